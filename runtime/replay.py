"""Replay of needed experts through the cache: what every hit rate of this project means. Knows no tensors or time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from ..collect.topology import MoeTopology
from ..collect.trace import SequenceRouting
from .cache import ExpertCache
from .policies.base import EvictionPolicy
from .policies.belady import Belady
from .policies.lru import Lru


class Event(NamedTuple):
    """The distinct experts that one (step, MoE layer) needs at once."""

    needed: tuple[int, ...]
    """Flat indices, ascending."""
    one_token: bool
    """Whether the event serves a single token."""


class ReplayResult(NamedTuple):
    """What a replay counted."""

    accesses: int
    """Distinct experts needed, summed over events."""
    misses: int

    @property
    def miss_rate(self) -> float:
        """Misses over distinct accesses."""
        return self.misses / max(1, self.accesses)


def decode_events(rows: Iterable[SequenceRouting], topology: MoeTopology) -> Iterator[Event]:
    """Turn every token into one event per MoE layer, in the order of the rows."""
    for row in rows:
        columns = [
            experts.astype(np.int64) + np.where(experts >= 0, topology.offsets[layer], 0)
            for layer, experts in zip(topology.layers_of(row.stack), row.layer_experts(topology), strict=True)
        ]
        for token in range(row.num_tokens):
            for column in columns:
                needed = sorted({int(expert) for expert in column[token] if expert >= 0})
                if needed:
                    yield Event(tuple(needed), True)


def prefill_events(rows: Iterable[SequenceRouting], topology: MoeTopology) -> Iterator[Event]:
    """Turn every row into one event per MoE layer: the union over its tokens."""
    for row in rows:
        for layer, experts in zip(topology.layers_of(row.stack), row.layer_experts(topology), strict=True):
            needed = np.unique(experts[experts >= 0]).astype(np.int64) + topology.offsets[layer]
            if len(needed):
                yield Event(tuple(needed.tolist()), row.num_tokens == 1)


def replay(events: Iterable[Event], capacity: int, policy: EvictionPolicy) -> ReplayResult:
    """Count the misses of a policy over events, cold at the start."""
    cache = ExpertCache(capacity, policy)
    accesses = misses = 0
    for event in events:
        accesses += len(event.needed)
        misses += len(cache.event(event.needed, one_token=event.one_token).misses)
    return ReplayResult(accesses, misses)


def replay_lru(events: Iterable[Event], capacity: int) -> ReplayResult:
    """Count the misses of LRU."""
    return replay(events, capacity, Lru())


def replay_belady(events: Sequence[Event], capacity: int) -> ReplayResult:
    """Count the misses of Belady's optimum, which is told all events."""
    return replay(events, capacity, Belady([event.needed for event in events]))


def recovered_share(misses: int, lru: int, belady: int) -> float | None:
    """Give (LRU misses - misses) / (LRU misses - Belady misses), None where those are equal."""
    return None if lru == belady else (lru - misses) / (lru - belady)
