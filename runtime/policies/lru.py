"""Least recently used: the victim is the smallest (last event that used it, layer, expert)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from collections.abc import Set as AbstractSet

from .base import EvictionPolicy


class Lru(EvictionPolicy):
    """Evict the expert whose last event is longest ago."""

    def __init__(self) -> None:
        # Insertion order is (last event, flat index): an event's experts are moved to the end in ascending order.
        self._order: OrderedDict[int, None] = OrderedDict()

    def use(self, needed: Sequence[int], event: int) -> None:
        """Move the event's experts behind all others."""
        order = self._order
        for expert in needed:
            order[expert] = None
            order.move_to_end(expert)

    def victims(self, count: int, protected: AbstractSet[int]) -> list[int]:
        """Name the experts at the front of the order."""
        chosen: list[int] = []
        for expert in self._order:
            if len(chosen) == count:
                break
            if expert not in protected:
                chosen.append(expert)
        return chosen

    def remove(self, expert: int) -> None:
        """Forget an expert."""
        self._order.pop(expert, None)

    def tracked(self) -> AbstractSet[int]:
        """Give the ranked experts."""
        return self._order.keys()
