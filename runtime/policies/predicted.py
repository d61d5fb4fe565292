"""Predicted use: the victim is the expert that is least wanted from now on, by what a predictor said of this step.

A forecast has two halves: `demand`, the probability that the present step uses an expert, and `reuse`, how much the
steps after it will. Of a layer that this step has run already only the reuse is left, corrected by the surprise: what
the forecast was made without is which experts this step did use. Of a layer that is yet to come, both count. So the
value of an expert of layer l' at an event of layer l is

    reuse + SURPRISE x (used - demand)   where l' <= l; used is 1 where this step used it, else 0
    demand + reuse                       where l' > l

Without a reuse head, reuse is how often the layer's events used the expert lately, an exponential average. Where a step
gets no forecast in time there is no demand, and the last reuse is the better guess: it holds for layers that this step
has yet to reach as it was, and each layer that runs without a forecast is averaged on from it, so that a reuse grows
old by the events that its layer has had since, and ends as the average of recent uses.

Where the caller says that forecasts are not to be acted on, the order is plain LRU.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING

import numpy as np

from ...collect.topology import MoeTopology
from .lru import Lru
from .scored import Scored

if TYPE_CHECKING:
    from ..forecast import Forecast

DECAY = 0.95  # of the average per event of a layer: about the last 20 tokens; 0.9 and 0.98 are within .04 of the gap

# Chosen on validation sequences with copy_attention: of 0, .05, .1, .15, .2 and .3 it recovers most of the gap on
# Mixtral-8x7B (.313; 0 .301, .1 .309, .3 .230) and within .001 of most on gpt-oss-20b (.683; 0 .684, .1 .667).
SURPRISE = 0.05


class Predicted(Scored):
    """Evict the expert with the least predicted use; ties go to the smallest (layer, expert)."""

    def __init__(self, topology: MoeTopology, decay: float = DECAY, surprise: float = SURPRISE) -> None:
        super().__init__(topology)
        self._absent = self._absent.astype(np.float32)  # as the values are: their sums need no conversion
        self._offsets = topology.offsets
        self._layer_of = np.repeat(np.arange(topology.num_layers), np.diff(topology.offsets)).tolist()
        self._decay, self._gain, self._surprise = (np.float32(share) for share in (decay, 1.0 - decay, surprise))
        self._reuse = np.zeros(topology.num_experts, np.float32)  # of layers that have run, corrected by the surprise
        self._value = np.zeros(topology.num_experts, np.float32)
        self._averaging = True  # no reuse was told for this step
        self._run = 0  # flat indices below belong to layers that have run since the forecast came
        self._forecast: Forecast | None = None
        self._acting = True
        self._order = Lru()

    def foresee(self, forecast: Forecast | None, *, acting: bool) -> None:
        """Take the forecast of the present step, or None where there is none in time.

        The same object at several events is one forecast; its arrays are not changed.
        """
        self._acting = acting
        if forecast is self._forecast:
            return
        self._forecast, self._run = forecast, 0
        self._averaging = forecast is None or forecast.reuse is None
        if forecast is None:
            self._value = self._reuse.copy()
        elif forecast.reuse is None:
            self._value = forecast.demand + self._reuse
        else:
            self._value = forecast.demand + forecast.reuse
            self._reuse = forecast.reuse - self._surprise * forecast.demand

    def use(self, needed: Sequence[int], event: int) -> None:
        """Note the use of experts of one layer, which has run now for this step."""
        super().use(needed, event)
        self._order.use(needed, event)
        layer = self._layer_of[needed[0]]
        low, high = self._offsets[layer], self._offsets[layer + 1]
        if self._averaging:
            self._reuse[low:high] *= self._decay
        gain = self._gain if self._averaging else self._surprise
        for expert in needed:
            self._reuse[expert] += gain
        first = min(self._run, low)
        self._value[first:high] = self._reuse[first:high]
        self._run = max(self._run, high)

    def victims(self, count: int, protected: AbstractSet[int]) -> list[int]:
        """Name the experts of least value."""
        if not self._acting:
            return self._order.victims(count, protected)
        return super().victims(count, protected)

    def scores(self) -> np.ndarray:
        """Give the present values."""
        return self._value

    def remove(self, expert: int) -> None:
        """Forget that an expert is resident; how often it was used is remembered."""
        super().remove(expert)
        self._order.remove(expert)
