"""Time, as something that can be replaced in tests and simulation."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Tell the time in seconds from an arbitrary start."""

    def now(self) -> float:
        """Give the present time in seconds."""
        ...


class SystemClock:
    """Tell the machine's monotonic time."""

    def now(self) -> float:
        """Give the present time in seconds."""
        return time.perf_counter()


class ManualClock:
    """Tell a time that only moves when told to: a public test double."""

    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        """Give the time set so far, in seconds."""
        return self.time

    def advance(self, seconds: float) -> None:
        """Move the time forward."""
        self.time += seconds
