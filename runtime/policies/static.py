"""A static hot set: the experts that were used most in a part of the trace, or under a given load, never leave.

The hot set is as large as the cache less one token's experts of one layer. Other experts pass through what is left, the
oldest first. The cache is cold at the start here too: a hot expert enters when it is first needed.
"""

from __future__ import annotations

import numpy as np

from ...collect.topology import MoeTopology
from .ranked import Ranked


def hot_places(load: np.ndarray, topology: MoeTopology, capacity: int) -> np.ndarray:
    """Give each expert's place among the hot, the most used one the largest, and 0 for all others; int64 [all experts].

    Ties go to the smallest (layer, expert); an expert without uses is never hot.
    """
    size = max(0, capacity - max(layer.top_k for layer in topology.layers))
    hot = np.argsort(-load.astype(np.float64), kind="stable")[:size]
    hot = hot[load[hot] > 0]
    places = np.zeros(len(load), np.int64)
    places[hot] = np.arange(len(hot), 0, -1)
    return places


class Static(Ranked):
    """Evict what is not hot, least recently used first.

    Args:
        load: uses of each expert [all experts].
    """

    def __init__(self, load: np.ndarray, topology: MoeTopology, capacity: int) -> None:
        super().__init__()
        self._places: list[int] = hot_places(load, topology, capacity).tolist()

    def rank(self, expert: int, event: int) -> tuple[int, int]:
        """Give the expert's place among the hot, 0 for all others, then the event."""
        return self._places[expert], event
