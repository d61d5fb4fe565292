"""Policies whose scores change between uses: scores of all experts as one array. Knows no rule."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from collections.abc import Set as AbstractSet

import numpy as np

from ...collect.topology import MoeTopology
from .base import EvictionPolicy

FEW = 6  # victims up to which searching the least each time is quicker than sorting some hundred scores


class Scored(EvictionPolicy):
    """Evict the expert with the smallest score; ties go to the smallest (layer, expert)."""

    def __init__(self, topology: MoeTopology) -> None:
        self._tracked: set[int] = set()
        self._absent = np.full(topology.num_experts, np.inf)  # 0 where an expert is tracked

    @abstractmethod
    def scores(self) -> np.ndarray:
        """Give the present score of every expert, float64 [all experts], finite; it is not changed."""

    def use(self, needed: Sequence[int], event: int) -> None:
        """Track the event's experts."""
        self._tracked.update(needed)
        for expert in needed:
            self._absent[expert] = 0.0

    def victims(self, count: int, protected: AbstractSet[int]) -> list[int]:
        """Name the experts of the smallest scores."""
        if count < 1:
            return []
        scores = self.scores() + self._absent
        for expert in protected:
            scores[expert] = np.inf
        if count > FEW:
            order = np.argsort(scores, kind="stable")[:count]
            return order[scores[order] < np.inf].tolist()
        chosen: list[int] = []
        for _ in range(count):
            least = int(scores.argmin())
            if scores[least] == np.inf:
                break
            chosen.append(least)
            scores[least] = np.inf
        return chosen

    def remove(self, expert: int) -> None:
        """Forget an expert."""
        self._tracked.discard(expert)
        self._absent[expert] = np.inf

    def tracked(self) -> AbstractSet[int]:
        """Give the ranked experts."""
        return self._tracked
