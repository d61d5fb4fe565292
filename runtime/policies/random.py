"""Random eviction: the floor that every rule has to beat."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...collect.topology import MoeTopology
from .scored import Scored


class Random(Scored):
    """Evict any expert, each with the same probability; the seed decides."""

    def __init__(self, topology: MoeTopology, seed: int = 0) -> None:
        super().__init__(topology)
        self._random = np.random.default_rng(seed)
        self._drawn: np.ndarray | None = None

    def use(self, needed: Sequence[int], event: int) -> None:
        """Forget the draw of the event before."""
        super().use(needed, event)
        self._drawn = None

    def scores(self) -> np.ndarray:
        """Draw once an event."""
        if self._drawn is None:
            self._drawn = self._random.random(len(self._absent))
        return self._drawn
