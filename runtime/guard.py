"""Never slower: whether a predictor earns its keep. Knows counts and seconds; knows nothing of threads or models.

A shadow directory (LRU, no bytes) sees the same events. Per window of events the predictor's worth is
  (shadow misses - blocks that were loaded) x read time + reads hidden by prefetch x read time - predictor time,
where blocks loaded = misses + delayed hits + on-time prefetches, and a wasted prefetch costs its read in full (an upper
bound: it ran in idle time). A window that is worth less than nothing suspends the predictor: it is not even asked,
since its time is what it may cost most. After a pause that doubles each time it is tried again for a window.
"""

from __future__ import annotations

from typing import NamedTuple

WINDOW_EVENTS = 256
FIRST_PAUSE = 2  # windows; doubled after every demotion


class Window(NamedTuple):
    """What one window of events counted."""

    shadow_misses: int
    loaded: int
    """Misses, delayed hits and on-time prefetches."""
    hidden: int
    """On-time prefetches."""
    wasted: int
    """Prefetches that left unused."""
    predictor_s: float
    read_s: float
    """Seconds that one read takes."""

    def since(self, before: Window) -> Window:
        """Give what was added to running totals; the read time stays."""
        return Window(
            self.shadow_misses - before.shadow_misses,
            self.loaded - before.loaded,
            self.hidden - before.hidden,
            self.wasted - before.wasted,
            self.predictor_s - before.predictor_s,
            self.read_s,
        )

    @property
    def worth_s(self) -> float:
        """Seconds that the predictor saved, negative where it cost."""
        return (self.shadow_misses - self.loaded + self.hidden - self.wasted) * self.read_s - self.predictor_s


class Guard:
    """Decide window by window whether forecasts are acted on."""

    def __init__(self) -> None:
        self.acting = True
        self.reason = "auto: acting on forecasts until the first window is measured"
        self._pause = FIRST_PAUSE
        self._rest = 0

    def judge(self, window: Window) -> bool:
        """Take a finished window and give whether to act in the next one."""
        if not self.acting:
            self._rest -= 1
            if self._rest <= 0:
                self.acting = True
                self.reason = "auto: trying the predictor again"
            return self.acting
        counts = (
            f"{window.worth_s * 1e3:+.1f} ms in {WINDOW_EVENTS} events ({window.shadow_misses} LRU misses against "
            f"{window.loaded} blocks loaded, {window.hidden} of them hidden, {window.wasted} wasted, "
            f"predictor {window.predictor_s * 1e3:.1f} ms)"
        )
        if window.worth_s < 0:
            self.acting = False
            self._rest = self._pause
            self._pause *= 2
            self.reason = f"auto: suspended for {self._rest} windows, worth {counts}"
        else:
            self.reason = f"auto: acting, worth {counts}"
        return self.acting
