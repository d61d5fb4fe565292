"""S3-FIFO (Yang et al., SOSP 2023): three queues, so that what is needed once leaves before what is needed again.

New experts enter a small queue of a tenth of the capacity; what left it lately (as many as the main queue holds)
enters the main queue instead. The victim is the oldest of the small queue where that is at least at its size, else of
the main queue. An expert of the small queue that was used more than once since it entered moves to the main queue
instead of leaving; one of the main queue that was used since it was last looked at goes round once more. Uses are
counted up to three.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from collections.abc import Set as AbstractSet

from .base import EvictionPolicy

SMALL_SHARE = 0.1
MOST_USES = 3


def queue_sizes(capacity: int) -> tuple[int, int]:
    """Give the size of the small queue and that of the ghost queue, which is the main queue's."""
    small = max(1, int(SMALL_SHARE * capacity))
    return small, max(1, capacity - small)


class S3Fifo(EvictionPolicy):
    """Evict from the small queue, then from the main queue."""

    def __init__(self, capacity: int) -> None:
        self.small_size, self.ghost_size = queue_sizes(capacity)
        self._small: dict[int, None] = {}  # oldest first, as the others
        self._main: dict[int, None] = {}
        self._ghost: dict[int, None] = {}  # left the small queue; not tracked
        self._uses: dict[int, int] = {}  # tracked expert -> uses after it entered or was last looked at
        self._plan: list[tuple[int, list[int]]] = []  # victims named last: each with what is looked at before it leaves

    def use(self, needed: Sequence[int], event: int) -> None:
        """Count uses of what is tracked and queue the others."""
        self._plan = []
        for expert in needed:
            if expert in self._uses:
                self._uses[expert] = min(MOST_USES, self._uses[expert] + 1)
                continue
            self._uses[expert] = 0
            if expert in self._ghost:
                del self._ghost[expert]
                self._main[expert] = None
            else:
                self._small[expert] = None

    def victims(self, count: int, protected: AbstractSet[int]) -> list[int]:
        """Name the experts that the queues would give up; they give them up in `remove`.

        Every look lowers a count or moves an expert to the main queue, so that the search ends.
        """
        small = (expert for expert in self._small if expert not in protected)
        main = (expert for expert in self._main if expert not in protected)
        behind: deque[int] = deque()  # at the end of the main queue since this search began
        seen: dict[int, int] = {}  # counts that this search lowered
        oldest, next_main, small_length = next(small, None), next(main, None), len(self._small)
        self._plan, passed = [], []
        while len(self._plan) < count:
            if next_main is None and behind:
                next_main = behind.popleft()
            if oldest is not None and (small_length >= self.small_size or next_main is None):
                expert, stays = oldest, self._uses[oldest] > 1
                oldest, small_length = next(small, None), small_length - 1
                seen[expert] = 0
            elif next_main is not None:
                expert, uses = next_main, seen.get(next_main, self._uses[next_main])
                stays, next_main = uses > 0, next(main, None)
                seen[expert] = uses - 1
            else:
                break
            if stays:
                passed.append(expert)
                behind.append(expert)
            else:
                self._plan.append((expert, passed))
                passed = []
        return [expert for expert, _ in self._plan]

    def remove(self, expert: int) -> None:
        """Take an expert out of its queue, together with the moves that were planned before it left."""
        if self._plan and self._plan[0][0] == expert:
            for passed in self._plan.pop(0)[1]:
                self._pass(passed)
        else:
            self._plan = []
        if expert in self._small:
            del self._small[expert]
            self._ghost[expert] = None
            while len(self._ghost) > self.ghost_size:
                del self._ghost[next(iter(self._ghost))]
        self._main.pop(expert, None)
        self._uses.pop(expert, None)

    def tracked(self) -> AbstractSet[int]:
        """Give the queued experts."""
        return self._uses.keys()

    def _pass(self, expert: int) -> None:
        """Let an expert that was used stay: from the small queue into the main one, or round the main one."""
        if expert in self._small:
            del self._small[expert]
            self._uses[expert] = 0
        else:
            del self._main[expert]
            self._uses[expert] -= 1
        self._main[expert] = None
