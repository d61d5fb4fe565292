"""Belady's optimum: the victim is used again last; ties go to the smallest (layer, expert). It is told the future."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .ranked import Ranked

NEVER = 1 << 60  # an event number beyond every trace


class Belady(Ranked):
    """Evict the expert whose next event is farthest away (Belady 1966).

    Args:
        future: the needed experts of every event, in the order in which `use` will be called.
    """

    def __init__(self, future: Iterable[Sequence[int]]) -> None:
        super().__init__()
        self._uses: dict[int, list[int]] = {}  # expert -> the events that use it and are still to come, latest first
        for event, needed in enumerate(future):
            for expert in needed:
                self._uses.setdefault(expert, []).append(event)
        for uses in self._uses.values():
            uses.reverse()

    def rank(self, expert: int, event: int) -> tuple[int, int]:
        """Give minus the next event."""
        uses = self._uses[expert]
        uses.pop()
        return (-uses[-1] if uses else -NEVER), 0
