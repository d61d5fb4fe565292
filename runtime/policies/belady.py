"""Belady's optimum: the victim is used again last; ties go to the smallest (layer, expert). It is told the future."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from heapq import heappop, heappush

from .base import EvictionPolicy

NEVER = 1 << 60  # an event number beyond every trace


class Belady(EvictionPolicy):
    """Evict the expert whose next event is farthest away (Belady 1966).

    Args:
        future: the needed experts of every event, in the order in which `use` will be called.
    """

    def __init__(self, future: Sequence[Sequence[int]]) -> None:
        self._after: list[dict[int, int]] = []  # per event: expert -> its next event after this one
        seen: dict[int, int] = {}
        for event in range(len(future) - 1, -1, -1):
            self._after.append({expert: seen.get(expert, NEVER) for expert in future[event]})
            seen.update(dict.fromkeys(future[event], event))
        self._after.reverse()
        self._next: dict[int, int] = {}  # tracked expert -> next event
        self._heap: list[tuple[int, int]] = []  # (-next event, expert); entries that no longer agree are skipped
        self._step = 0

    def use(self, needed: Sequence[int], event: int) -> None:
        """Look up when each of the event's experts is used again."""
        after = self._after[self._step]
        self._step += 1
        for expert in needed:
            self._next[expert] = after[expert]
            heappush(self._heap, (-after[expert], expert))

    def victims(self, count: int, protected: AbstractSet[int]) -> list[int]:
        """Name the experts whose next event is farthest away."""
        chosen: list[int] = []
        kept: list[tuple[int, int]] = []
        while self._heap and len(chosen) < count:
            entry = heappop(self._heap)
            expert = entry[1]
            if self._next.get(expert) != -entry[0] or expert in chosen:
                continue
            kept.append(entry)
            if expert not in protected:
                chosen.append(expert)
        for entry in kept:  # all stay ranked until `remove`
            heappush(self._heap, entry)
        return chosen

    def remove(self, expert: int) -> None:
        """Forget an expert."""
        self._next.pop(expert, None)

    def tracked(self) -> AbstractSet[int]:
        """Give the ranked experts."""
        return self._next.keys()
