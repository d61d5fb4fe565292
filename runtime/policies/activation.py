"""Activation-aware eviction, MoE-Infinity's rule: how much the running request uses an expert, early layers first.

The request's expert activation matrix counts, per layer, the events that used each expert since the request began.
An expert's value is its share of its layer's row times a weight that falls with the layer: an early layer's experts
cannot be prefetched in time, so that they stay. Within an event of several tokens an expert counts once, since a cache
is told which experts are needed and not by how many tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...collect.topology import MoeTopology
from .scored import Scored

EPSILON = 1e-3  # of one use: it only decides among experts that the request has not used, by their layer


def layer_weights(topology: MoeTopology) -> list[float]:
    """Give 1 - layer / L of every layer."""
    return [1.0 - layer / topology.num_layers for layer in range(topology.num_layers)]


class Activation(Scored):
    """Evict the smallest (uses in the request + epsilon) / (the layer's uses + epsilon x experts) x (1 - layer / L)."""

    def __init__(self, topology: MoeTopology) -> None:
        super().__init__(topology)
        self._offsets = topology.offsets
        sizes = np.diff(topology.offsets)
        self._layer_of = np.repeat(np.arange(topology.num_layers), sizes).tolist()
        self._near = layer_weights(topology)
        self._unseen = np.repeat(np.array(self._near) / sizes, sizes)
        self.restart()

    def restart(self) -> None:
        """Begin another request."""
        self._uses = np.zeros(len(self._layer_of))
        self._sums = [0] * len(self._near)
        self._scores = self._unseen.copy()

    def use(self, needed: Sequence[int], event: int) -> None:
        """Count the event in its layer's row."""
        super().use(needed, event)
        layer = self._layer_of[needed[0]]
        low, high = self._offsets[layer], self._offsets[layer + 1]
        for expert in needed:
            self._uses[expert] += 1.0
        self._sums[layer] += len(needed)
        scale = self._near[layer] / (self._sums[layer] + EPSILON * (high - low))
        self._scores[low:high] = (self._uses[low:high] + EPSILON) * scale

    def scores(self) -> np.ndarray:
        """Give the share of the row times the layer's weight."""
        return self._scores
