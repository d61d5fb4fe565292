"""Predicted demand: the victim is the expert least likely to be used soon.

An expert's value is how often its layer used it lately (an exponential average over the layer's events) plus, for
layers that this step has not reached yet, the forecast's probability that this step uses it. Layers that were already
run get no forecast: their next use is a later step's, for which this forecast says nothing.

Where the caller says that forecasts are not to be acted on, the order is plain LRU.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet

import numpy as np

from ...collect.topology import MoeTopology
from .base import EvictionPolicy
from .lru import Lru

DECAY = 0.95  # of the average per event of a layer: about the last 20 tokens; 0.9 and 0.98 are within .04 of the gap


class Predicted(EvictionPolicy):
    """Evict the expert with the least predicted demand; ties go to the smallest (layer, expert)."""

    def __init__(self, topology: MoeTopology, decay: float = DECAY) -> None:
        self._offsets, self._decay = topology.offsets, decay
        self._layer_of = np.repeat(np.arange(topology.num_layers), np.diff(topology.offsets))
        self._recent = np.zeros(topology.num_experts, np.float32)
        self._demand: np.ndarray | None = None
        self._reached = 0  # first flat index beyond the layer of the present event
        self._acting = True
        self._order = Lru()

    def foresee(self, demand: np.ndarray | None, *, acting: bool) -> None:
        """Take the forecast of the present step, or None where there is none in time."""
        self._demand, self._acting = demand, acting

    def use(self, needed: Sequence[int], event: int) -> None:
        """Note the use of experts of one layer."""
        self._order.use(needed, event)
        layer = self._layer_of[needed[0]]
        low, self._reached = self._offsets[layer], self._offsets[layer + 1]
        self._recent[low : self._reached] *= self._decay
        self._recent[list(needed)] += 1.0 - self._decay

    def victims(self, count: int, protected: AbstractSet[int]) -> list[int]:
        """Name the experts of least value."""
        if not self._acting:
            return self._order.victims(count, protected)
        candidates = np.array(sorted(self._order.tracked() - protected), np.int64)
        value = self._recent[candidates]
        if self._demand is not None:
            value = value + np.where(candidates >= self._reached, self._demand[candidates], 0.0)
        return candidates[np.argsort(value, kind="stable")[:count]].tolist()

    def remove(self, expert: int) -> None:
        """Forget that an expert is resident; how often it was used is remembered."""
        self._order.remove(expert)

    def tracked(self) -> AbstractSet[int]:
        """Give the ranked experts."""
        return self._order.tracked()
