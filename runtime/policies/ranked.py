"""Policies whose ranks change only when an expert is used: a heap of ranks. Knows no rule; subclasses give the rank."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from heapq import heapify, heappop, heappush

from .base import EvictionPolicy

Entry = tuple[int, int, int]  # rank, second rank, expert


class Ranked(EvictionPolicy):
    """Evict the expert with the smallest rank."""

    def __init__(self) -> None:
        self._entries: dict[int, Entry] = {}  # tracked expert -> its entry
        self._heap: list[Entry] = []  # every entry, and others that are no longer in `_entries`: those are skipped

    @abstractmethod
    def rank(self, expert: int, event: int) -> tuple[int, int]:
        """Give an expert's rank, which holds from this use until its next; ties go to the smallest expert."""

    def use(self, needed: Sequence[int], event: int) -> None:
        """Rank the event's experts anew."""
        entries, heap = self._entries, self._heap
        for expert in needed:
            entries[expert] = entry = (*self.rank(expert, event), expert)
            heappush(heap, entry)
        if len(heap) > 64 + 4 * len(entries):
            heap[:] = entries.values()
            heapify(heap)

    def victims(self, count: int, protected: AbstractSet[int]) -> list[int]:
        """Name the experts of the smallest ranks."""
        entries, heap = self._entries, self._heap
        chosen: list[int] = []
        kept: list[Entry] = []
        last: Entry | None = None
        while heap and len(chosen) < count:
            entry = heappop(heap)
            expert = entry[2]
            if entry == last or entries.get(expert) != entry:
                continue
            kept.append(entry)
            last = entry
            if expert not in protected:
                chosen.append(expert)
        for entry in kept:  # all stay ranked until `remove`
            heappush(heap, entry)
        return chosen

    def remove(self, expert: int) -> None:
        """Forget an expert."""
        self._entries.pop(expert, None)

    def tracked(self) -> AbstractSet[int]:
        """Give the ranked experts."""
        return self._entries.keys()
