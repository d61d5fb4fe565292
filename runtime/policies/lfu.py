"""Least frequently used, as MoE-Infinity's open code evicts: by uses since the expert entered the cache."""

from __future__ import annotations

from collections.abc import Sequence

from .ranked import Ranked


class Lfu(Ranked):
    """Evict the smallest (uses since it entered, last event, layer, expert)."""

    def __init__(self) -> None:
        super().__init__()
        self._uses: dict[int, int] = {}

    def use(self, needed: Sequence[int], event: int) -> None:
        """Count a use of each of the event's experts."""
        for expert in needed:
            self._uses[expert] = self._uses.get(expert, 0) + 1
        super().use(needed, event)

    def rank(self, expert: int, event: int) -> tuple[int, int]:
        """Give the uses, then the event."""
        return self._uses[expert], event

    def remove(self, expert: int) -> None:
        """Forget an expert and how often it was used."""
        super().remove(expert)
        self._uses.pop(expert, None)
