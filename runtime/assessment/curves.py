"""Miss rates over capacity, of every policy and of the optimum. Knows events, policies by name, costs of a machine."""

# N events, C capacities

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...collect.topology import MoeTopology
from ..events import Events, Reading
from ..policies.registry import SIMULATED
from ..replay import recovered_share
from ..simulation import miss_counts
from ..time_model import EventCosts, replay_time
from .intervals import ratio, ratio_interval

log = logging.getLogger(__name__)

OPTIMUM = "belady"
BASE = "lru"
OTHERS, EARLY = "other sequences", "the first fifth of the same events"  # what a static hot set may be fitted on
SHARES = (0.125, 0.25, 0.5, 0.75, 1.0)  # of all experts
TOKENS = (0.5, 1.0, 2.0)  # of what a token uses in all layers; twice that is where caches bend (arXiv 2505.16056)
APART = 1.12  # capacities closer than this tell the same


def capacities_of(topology: MoeTopology, reference: int) -> list[int]:
    """Choose the capacities of the curves: from the largest top-k to all experts, the reference among them."""
    active, total = sum(layer.top_k for layer in topology.layers), topology.num_experts
    wanted = [max(layer.top_k for layer in topology.layers), *(int(share * total) for share in SHARES)]
    wanted += [int(tokens * active) for tokens in TOKENS]
    kept = {reference, total}
    for capacity in sorted({capacity for capacity in wanted if 1 <= capacity <= total}):
        if all(max(capacity, other) > APART * min(capacity, other) for other in kept):
            kept.add(capacity)
    return sorted(kept)


def miss_curves(
    events: Events,
    capacities: Sequence[int],
    topology: MoeTopology,
    *,
    load: np.ndarray,
    seed: int = 0,
    policies: Sequence[str] = SIMULATED,
) -> dict[str, dict[int, np.ndarray]]:
    """Replay every policy at every capacity and give the misses of each event, int32 [N], by policy and capacity."""
    found: dict[str, dict[int, np.ndarray]] = {}
    for policy in policies:
        log.info("replaying %s", policy)
        found[policy] = {
            capacity: miss_counts(events, capacity, policy, topology, load=load, seed=seed) for capacity in capacities
        }
    return found


@dataclass(frozen=True, kw_only=True, eq=False)
class Replay:
    """Hold what every policy missed at every capacity, on the same events."""

    events: Events
    """What was replayed."""
    reading: Reading
    """How rows became events."""
    capacity: int
    """The capacity that was asked about, in experts."""
    counts: dict[str, dict[int, np.ndarray]]
    """Misses of each event, int32 [N], by policy and capacity."""
    load: np.ndarray
    """Uses of each expert that the static policy was fitted on, in flat order."""
    static_fitted_on: str
    """Which events those were: `OTHERS` or `EARLY`."""
    costs: EventCosts | None = None
    """Seconds that the events take on a machine; None where none or no sizes are known."""

    def at(self, policy: str) -> np.ndarray:
        """Give the misses of each event at the capacity that was asked about."""
        return self.counts[policy][self.capacity]

    def misses(self, policy: str) -> int:
        """Give their sum."""
        return int(self.at(policy).sum())

    @property
    def free(self) -> str:
        """The policy with the fewest misses that is told no future; LRU where none is better.

        A static hot set that saw part of what it is measured on is none of them.
        """
        told = {BASE, OPTIMUM} if self.static_fitted_on == OTHERS else {BASE, OPTIMUM, "static"}
        free = [BASE, *(name for name in self.counts if name not in told)]
        return min(free, key=self.misses)

    def to_json(self, topology: MoeTopology) -> dict[str, Any]:
        """Give the curves as plain values.

        Returns:
            {"capacities", "shares" (of all experts), "accesses", "static_fitted_on", "policies": {NAME: lists by
            capacity of "misses", "miss_rate", "interval" (over sequences; None for one), "tokens_per_s" (on demand;
            None without a machine), and "recovered_share" at the capacity asked about}}
        """
        capacities = sorted(next(iter(self.counts.values())))
        whole = per_sequence(self.events, self.events.needs)
        policies = {}
        for name, by_capacity in self.counts.items():
            each = [by_capacity[capacity] for capacity in capacities]
            policies[name] = {
                "misses": [int(misses.sum()) for misses in each],
                "miss_rate": [ratio(misses, self.events.accesses) for misses in each],
                "interval": [ratio_interval(per_sequence(self.events, misses), whole) for misses in each],
                "tokens_per_s": None if self.costs is None else [_rate(self.costs, misses) for misses in each],
                "recovered_share": recovered_share(self.misses(name), self.misses(BASE), self.misses(OPTIMUM)),
            }
        return {
            "capacities": capacities,
            "shares": [capacity / topology.num_experts for capacity in capacities],
            "accesses": self.events.accesses,
            "static_fitted_on": self.static_fitted_on,
            "policies": policies,
        }


def per_sequence(events: Events, counts: np.ndarray) -> np.ndarray:
    """Sum a count per event over each sequence."""
    return np.bincount(events.sequences, weights=counts)


def _rate(costs: EventCosts, misses: np.ndarray) -> float:
    return 1 / replay_time(costs, misses).per_token_s
