"""Replay of needed experts through the cache: what every hit rate of this project means. Knows no tensors or time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from .cache import ExpertCache
from .events import Event, Events
from .policies.base import EvictionPolicy
from .policies.belady import Belady
from .policies.lru import Lru


class ReplayResult(NamedTuple):
    """What a replay counted."""

    accesses: int
    """Distinct experts needed, summed over events."""
    misses: int

    @property
    def miss_rate(self) -> float:
        """Misses over distinct accesses."""
        return self.misses / max(1, self.accesses)


def replay(events: Iterable[Event], capacity: int, policy: EvictionPolicy) -> ReplayResult:
    """Count the misses of a policy over events, cold at the start.

    The policy is not told where a sequence starts: plain events do not say; `simulation.miss_counts` does tell it.
    """
    cache = ExpertCache(capacity, policy)
    accesses = misses = 0
    for event in events:
        accesses += len(event.needed)
        misses += len(cache.event(event.needed, one_token=event.one_token).misses)
    return ReplayResult(accesses, misses)


def replay_lru(events: Iterable[Event], capacity: int) -> ReplayResult:
    """Count the misses of LRU."""
    return replay(events, capacity, Lru())


def replay_belady(events: Sequence[Event] | Events, capacity: int) -> ReplayResult:
    """Count the misses of Belady's optimum, which is told all events."""
    return replay(events, capacity, Belady([event.needed for event in events]))


def recovered_share(misses: int, lru: int, belady: int) -> float | None:
    """Give (LRU misses - misses) / (LRU misses - Belady misses), None where those are equal."""
    return None if lru == belady else (lru - misses) / (lru - belady)
