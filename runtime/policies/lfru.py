"""Least frequently and recently used: uses since the expert entered, over the events since its last use.

LFRU as engines for MoE offloading score it (tinyserve: frequency over age). An expert that has just entered has one
use and the least age, so that it outlives rarely used ones that have not been needed for a while.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...collect.topology import MoeTopology
from .scored import Scored


class Lfru(Scored):
    """Evict the smallest uses / (1 + events since the last use)."""

    def __init__(self, topology: MoeTopology) -> None:
        super().__init__(topology)
        self._uses, self._last = np.zeros(topology.num_experts), np.zeros(topology.num_experts)
        self._now = 0

    def use(self, needed: Sequence[int], event: int) -> None:
        """Count a use of each of the event's experts."""
        super().use(needed, event)
        self._now = event
        for expert in needed:
            self._uses[expert] += 1.0
            self._last[expert] = event

    def scores(self) -> np.ndarray:
        """Give uses over age."""
        return self._uses / ((self._now + 1.0) - self._last)

    def remove(self, expert: int) -> None:
        """Forget an expert and how often it was used."""
        super().remove(expert)
        self._uses[expert] = 0.0
