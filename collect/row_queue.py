"""A queue of trace rows that is bounded in calls and in bytes. Knows threads; knows nothing of files or checks.

Threads: any thread may put, one thread gets. put() blocks while the bounds are reached. get() sleeps until a quarter of
the calls or half of the bytes that may wait are there, a put() is blocked, or the end has come, and then hands out all
that waits: waking a thread for every row costs as much as checking the row. After fail() every put() returns at once,
so that no caller waits for a thread that has stopped writing.
"""

from __future__ import annotations

import threading
from collections import deque

from .sequence import SequenceRouting

Rows = list[SequenceRouting]


class RowQueue:
    """Hand over rows, first in first out.

    Args:
        max_calls: puts that may wait.
        max_bytes: bytes of their rows; one put that is larger than this on its own waits until it is alone.
    """

    def __init__(self, max_calls: int, max_bytes: int) -> None:
        self.max_calls, self.max_bytes = max_calls, max_bytes
        self._waiting: deque[tuple[Rows | None, int]] = deque()
        self._bytes = 0
        self._failed = False
        self._lock = threading.Lock()
        self._room, self._work = threading.Condition(self._lock), threading.Condition(self._lock)
        self._batch = max(max_calls // 4, 1)  # puts that are worth waking the getter for
        self._awake = False  # whether the getter is to take what waits, down to the last

    def put(self, rows: Rows | None) -> None:
        """Add rows, or None for the end, which is never kept waiting."""
        size = 0 if rows is None else sum(map(num_bytes, rows))
        with self._lock:
            if rows is not None:
                self._room.wait_for(lambda: self._may_put(size))
            if not self._failed or rows is None:
                self._waiting.append((rows, size))
                self._bytes += size
                if rows is None or len(self._waiting) >= self._batch or self._bytes >= self.max_bytes // 2:
                    self._wake()

    def get(self) -> Rows | None:
        """Take the oldest rows, or None at the end."""
        with self._lock:
            if not self._waiting:
                self._awake = False
            self._work.wait_for(lambda: self._awake)
            rows, size = self._waiting.popleft()
            self._bytes -= size
            self._room.notify_all()
            return rows

    def fail(self) -> None:
        """Forget what waits and let every put() pass from now on."""
        with self._lock:
            self._failed = True
            self._waiting = deque(item for item in self._waiting if item[0] is None)
            self._bytes = 0
            self._room.notify_all()

    def _may_put(self, size: int) -> bool:
        if self._failed or self._has_room(size):
            return True
        self._wake()  # else it would wait for a getter that waits for more
        return False

    def _wake(self) -> None:
        if not self._awake:
            self._awake = True
            self._work.notify()

    def _has_room(self, size: int) -> bool:
        return not self._waiting or (len(self._waiting) < self.max_calls and self._bytes + size <= self.max_bytes)


def num_bytes(row: SequenceRouting) -> int:
    """Count the bytes of a row's arrays and text."""
    arrays = (row.experts, row.token_ids, row.weights, row.scores, row.hidden)
    return sum(array.nbytes for array in arrays if array is not None) + len(row.text or "")
