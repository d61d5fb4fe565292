"""Smaller sizes for documented commands. Knows one environment variable and nothing else.

With FOREGATE_SMOKE=1 the commands of the README and the demo take the same steps on less text, so that tests can run
them all. It never changes what a command does, only how much of it.
"""

from __future__ import annotations

import os
from typing import TypeVar

Size = TypeVar("Size", int, float)


def smoke(full: Size, small: Size) -> Size:
    """Give the smaller of the two where FOREGATE_SMOKE=1, else `full`."""
    return min(full, small) if os.environ.get("FOREGATE_SMOKE") == "1" else full
