"""Rings of state: the last W entries of something, where appending costs one entry and the earlier ring stays good.

A step that returned a whole ring would copy it: at W = 512 and 768 numbers an entry that is 1.6 MB, or 0.3 ms a token.
Knows arrays; knows nothing of predictors or graphs.
"""

# B batch, W window

from __future__ import annotations

import numpy as np

ROOM = 512  # entries that a buffer has beyond one window: how often a window is moved to a new buffer


class _Buffer:
    """Entries of successive rings, oldest first, batch second so that a window is one piece of memory."""

    def __init__(self, window_WB: np.ndarray) -> None:
        self.entries = np.empty((len(window_WB) + ROOM, *window_WB.shape[1:]), window_WB.dtype)
        self.entries[: len(window_WB)] = window_WB
        self.written = len(window_WB)


class Ring:
    """Hold the last W entries, oldest first; rings are values: appending gives another one."""

    def __init__(self, entries_BW: np.ndarray) -> None:
        """Start with entries [B, W, ...]."""
        self.window = entries_BW.shape[1]
        self._buffer, self._stop = _Buffer(np.moveaxis(entries_BW, 1, 0)), self.window

    def append(self, entry_B: np.ndarray) -> Ring:
        """Give the ring after one more entry [B, ...]; the oldest is dropped."""
        buffer, stop = self._buffer, self._stop
        if stop != buffer.written or stop == len(buffer.entries):  # another ring went on from here, or it is full
            buffer = _Buffer(buffer.entries[stop - self.window : stop])  # which has room for at least one more
            stop = self.window
        buffer.entries[stop] = entry_B
        buffer.written = stop + 1
        after = object.__new__(Ring)
        after.window, after._buffer, after._stop = self.window, buffer, stop + 1
        return after

    def array(self) -> np.ndarray:
        """Give the entries [B, W, ...]; of one sequence without a copy."""
        return np.moveaxis(self._buffer.entries[self._stop - self.window : self._stop], 0, 1)
