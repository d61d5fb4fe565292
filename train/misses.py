"""Which experts of recorded tokens an LRU cache would have missed: what a prefetch can help with at all.

Knows rows of traces and the engine's own cache; knows no predictors.
"""

# T tokens, L MoE layers of a stack, K experts per token

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..collect.trace import SequenceRouting
from ..predictors.base import PredictorSpec
from ..predictors.rows import dense
from ..runtime.cache import ExpertCache
from ..runtime.policies.lru import Lru

CAPACITY_SHARE = 0.25  # of the experts of the layers served
MOST_ACCESSES = 400_000  # some seconds; the miss rate of LRU has settled long before


def missed_by_lru(
    rows: Sequence[SequenceRouting], spec: PredictorSpec, capacity: int, most_accesses: int = MOST_ACCESSES
) -> list[np.ndarray | None]:
    """Serve rows token by token, one event per layer, from a cache that is cold at the start.

    Args:
        rows: whole sequences of the spec's stack.
        capacity: experts that the cache holds.
        most_accesses: after so many, no further row is served.

    Returns:
        per row bool [T, L, K]: whether the expert was needed and absent; None where the row was not served.
    """
    cache, found, accesses = ExpertCache(capacity, Lru()), [], 0
    offsets = np.arange(spec.shape[0])[:, None] * spec.shape[1]
    for row in rows:
        if accesses >= most_accesses:
            found.append(None)
            continue
        experts = dense(row, spec.topology)
        flat = np.where(experts >= 0, experts + offsets, -1)
        missed = np.zeros(flat.shape, bool)
        for token, layers in enumerate(flat.tolist()):
            for layer, entries in enumerate(layers):
                needed = sorted({entry for entry in entries if entry >= 0})
                if not needed:
                    continue
                absent = cache.event(needed, one_token=True).misses
                accesses += len(needed)
                for entry in absent:
                    missed[token, layer, entries.index(entry)] = True
        found.append(missed)
    return found


def capacity_of(spec: PredictorSpec) -> int:
    """Give `CAPACITY_SHARE` of the experts of the layers served, rounded down, at least 1."""
    experts = sum(spec.topology.layers[index].num_experts for index in spec.layers)
    return max(1, int(CAPACITY_SHARE * experts + 1e-9))
