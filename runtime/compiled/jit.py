"""Compiling a loop with numba. Needs the extra `fast`; knows nothing of what the loop does.

Compiled code is cached beside its source or in numba's folder for the user, and nowhere if neither can be written.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import njit


def compiled(loop: Callable[..., Any]) -> Any:
    """Compile a function when it is first called."""
    try:
        return njit(cache=True)(loop)
    except RuntimeError:  # no folder to cache in
        return njit(loop)
