"""The contract of eviction policies. Knows flat expert indices and events; knows nothing of slots, bytes or models.

A policy ranks the experts that were demanded and are resident. It is told of every event, in order, and is asked who
leaves: always when the cache is over its capacity, and once in every event whether anybody must leave in any case.
Comparing flat indices compares (layer, expert), so ties go to the smallest flat index.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..forecast import Forecast


class EvictionPolicy(ABC):
    """Rank resident experts; the least valuable leaves first."""

    def foresee(self, forecast: Forecast | None, *, acting: bool) -> None:  # noqa: B027 - optional
        """Take the forecast for the event that follows; policies that rank by the past alone ignore it.

        Args:
            forecast: what a predictor said of the present step, the same object at all of its events; None where
                there is nothing in time.
            acting: False where forecasts are only observed.
        """

    def restart(self) -> None:  # noqa: B027 - optional
        """Note that the event that follows is the first of another sequence; few policies care."""

    @abstractmethod
    def use(self, needed: Sequence[int], event: int) -> None:
        """Note that the event used these experts (ascending flat indices); all of them are tracked from now on."""

    @abstractmethod
    def victims(self, count: int, protected: AbstractSet[int]) -> list[int]:
        """Name the `count` least valuable tracked experts that are not protected, least valuable first.

        Fewer are named where fewer are tracked. Nothing is forgotten: `remove` follows for those that leave.
        """

    def overdue(self, protected: AbstractSet[int]) -> list[int]:
        """Name tracked experts, none of them protected, that leave now although the cache may have room for them.

        Asked once in every event, after `use`; `remove` follows for each. Only policies with parts of a fixed size
        name any.
        """
        return []

    @abstractmethod
    def remove(self, expert: int) -> None:
        """Forget an expert that left the cache; unknown experts are ignored."""

    @abstractmethod
    def tracked(self) -> AbstractSet[int]:
        """Give the experts that the policy ranks, for `check`."""
