"""The contract of eviction policies. Knows flat expert indices and events; knows nothing of slots, bytes or models.

A policy ranks the experts that were demanded and are resident. It is told of every event, in order, and is asked who
leaves. Comparing flat indices compares (layer, expert), so ties go to the smallest flat index.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from collections.abc import Set as AbstractSet

import numpy as np


class EvictionPolicy(ABC):
    """Rank resident experts; the least valuable leaves first."""

    def foresee(self, demand: np.ndarray | None, *, acting: bool) -> None:  # noqa: B027 - optional
        """Take the forecast for the event that follows; policies that rank by the past alone ignore it.

        Args:
            demand: float32 [all experts], probability that the present step uses each; None where there is none.
            acting: False where forecasts are only observed.
        """

    @abstractmethod
    def use(self, needed: Sequence[int], event: int) -> None:
        """Note that the event used these experts (ascending flat indices); all of them are tracked from now on."""

    @abstractmethod
    def victims(self, count: int, protected: AbstractSet[int]) -> list[int]:
        """Name the `count` least valuable tracked experts that are not protected, least valuable first.

        Fewer are named where fewer are tracked. Nothing is forgotten: `remove` follows for those that leave.
        """

    @abstractmethod
    def remove(self, expert: int) -> None:
        """Forget an expert that left the cache; unknown experts are ignored."""

    @abstractmethod
    def tracked(self) -> AbstractSet[int]:
        """Give the experts that the policy ranks, for `check`."""
