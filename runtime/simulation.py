"""Simulation: the events of a trace under many policies, capacities and machines. Knows no tensors, files or threads.

events = events_of(trace, trace.topology, "decode")
results = simulate(events, 192, ["lru", "lfu"], trace.topology)
results["lfu"].recovered_share
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from ..collect.errors import SettingError
from ..collect.topology import MoeTopology
from ..collect.trace import SequenceRouting
from ..predictors.base import Predictor
from ..predictors.rows import join_parts
from .cache import ExpertCache
from .compiled import replays
from .events import Events, Reading, events_of
from .foreseen import foreseen_misses
from .foresight import forecasts_of
from .hardware import HardwareProfile
from .policies.registry import PolicySetting, check_policies, make_policy
from .replay import recovered_share
from .time_model import EventCosts, ModelSizes, event_costs, limit_s, perfect_prefetch_time, replay_time

EARLY_SHARE = 0.2  # of the events, where a static policy is given no load of others


@dataclass(frozen=True, kw_only=True, eq=False)
class PolicyResult:
    """Say how one policy did on the events of one replay."""

    policy: str
    """Name of the policy."""
    capacity: int
    """Experts that the cache held."""
    accesses: int
    """Distinct experts needed, summed over events."""
    misses: int
    """Those that were absent when their event started; the cache is cold at the start."""
    recovered_share: float | None
    """(LRU misses - misses) / (LRU misses - Belady misses); None where those are equal."""
    event_misses: np.ndarray
    """int32 [N], misses of each event."""
    layer_misses: np.ndarray
    """int64 [L], misses of each MoE layer."""
    layer_accesses: np.ndarray
    """int64 [L], accesses of each MoE layer."""
    time_per_token_s: float | None = None
    """Simulated seconds per token; None without a machine or without the sizes of the model, as all that follows."""
    stall_s: float | None = None
    """Simulated seconds that compute waited for experts, in all."""
    measured_over_limit: float | None = None
    """Simulated time over max(resident compute, Belady misses x seconds per block)."""
    prefetched_time_per_token_s: float | None = None
    """Simulated seconds per token if each forward knew its misses from its start; see `perfect_prefetch_time`."""

    @property
    def miss_rate(self) -> float:
        """Misses over distinct accesses."""
        return self.misses / max(1, self.accesses)


def num_slots(capacity: float | int, topology: MoeTopology) -> int:
    """Give a capacity as a number of experts: a share in (0, 1) is rounded down, at least 1 is a number itself.

    Raises:
        SettingError: if it is no such number, or leaves no expert.
    """
    experts = topology.num_experts
    held = 0
    if 0 < capacity < 1:
        held = int(capacity * experts + 1e-9)  # 0.29 * 100 is a little less than 29
    elif capacity >= 1 and float(capacity).is_integer():
        held = int(capacity)
    if not 1 <= held <= experts:
        raise SettingError(
            f"capacity must be a share of the {experts} experts in (0, 1) that holds at least one, or a whole number "
            f"in 1..{experts}, got {capacity}."
        )
    return held


def miss_counts(
    events: Events, capacity: int, policy: str, topology: MoeTopology, *, load: np.ndarray | None = None, seed: int = 0
) -> np.ndarray:
    """Replay one policy, cold at the start, and give the misses of each event.

    Args:
        capacity: experts that the cache holds.
        policy: a name of `SIMULATED`.
        load: uses of each expert [all experts] that a static policy is fitted on, from `load_of` other events; by
            default the first EARLY_SHARE of these, which is then also replayed.
        seed: of what is drawn.

    Returns:
        int32 [N].

    Raises:
        SettingError: if there is no such policy, or the capacity is not positive.
    """
    if policy == "static" and load is None:
        load = early_load(events, topology)
    check_policies([policy])
    if capacity < 1:
        raise SettingError(f"capacity must be at least 1 expert, got {capacity}.")
    future = (event.needed for event in events)
    setting = PolicySetting(topology=topology, capacity=capacity, future=future, load=load, seed=seed)
    quick = replays().get(policy)
    return python_misses(events, policy, setting) if quick is None else quick(events, setting)


def python_misses(events: Events, policy: str, setting: PolicySetting) -> np.ndarray:
    """Replay the policy's own class, as the engine runs it; see `miss_counts`."""
    made = make_policy(policy, setting)
    cache = ExpertCache(setting.capacity, made)
    restarts = (np.diff(events.sequences, prepend=-1) > 0).tolist()
    counts = np.zeros(len(events), np.int32)
    for index, (event, restart) in enumerate(zip(events, restarts, strict=True)):
        if restart:
            made.restart()
        counts[index] = len(cache.event(event.needed, one_token=event.one_token).misses)
    return counts


def early_load(events: Events, topology: MoeTopology) -> np.ndarray:
    """Count the uses of each expert in the first EARLY_SHARE of the events, int64 [all experts]."""
    early = events.experts[: events.starts[int(EARLY_SHARE * len(events))]]
    return np.bincount(early, minlength=topology.num_experts)


def load_of(events: Events, topology: MoeTopology) -> np.ndarray:
    """Count the events that use each expert, int64 [all experts]: what a static policy is fitted on."""
    return np.bincount(events.experts, minlength=topology.num_experts)


def simulate(
    events: Events,
    capacity: int,
    policies: Sequence[str],
    topology: MoeTopology,
    *,
    load: np.ndarray | None = None,
    seed: int = 0,
    hardware: HardwareProfile | None = None,
    sizes: ModelSizes | None = None,
    foreseen: np.ndarray | None = None,
) -> dict[str, PolicyResult]:
    """Replay policies over the same events and give their results by name, in the order asked for.

    LRU and Belady are always replayed, since every recovered share is measured between them.

    Args:
        capacity: experts that the cache holds.
        policies: names of `SIMULATED`, and `predicted` where its misses are given.
        load: uses of each expert [all experts] that a static policy is fitted on, from `load_of` other events; by
            default the first EARLY_SHARE of these, which is then also replayed.
        seed: of what is drawn.
        foreseen: misses of each event under `predicted`, int32 [N], from `foreseen_misses` of the same events.
        hardware: machine that times are given for; they need sizes too.
        sizes: of the model; by default what the topology knows.

    Raises:
        SettingError: if there is no such policy, or the capacity is not positive.
    """
    check_policies(policies, foreseen=foreseen is not None)
    counts = {} if foreseen is None else {"predicted": foreseen}
    for name in dict.fromkeys(["lru", "belady", *policies]):
        if name not in counts:
            counts[name] = miss_counts(events, capacity, name, topology, load=load, seed=seed)
    lru, belady = int(counts["lru"].sum()), int(counts["belady"].sum())
    layer_accesses = _per_layer(events, events.needs, topology)
    sizes = sizes or ModelSizes.of(topology)
    costs = None if hardware is None or sizes.missing else event_costs(events, topology, sizes, hardware)
    results = {}
    for name in policies:
        misses = int(counts[name].sum())
        results[name] = PolicyResult(
            policy=name,
            capacity=capacity,
            accesses=events.accesses,
            misses=misses,
            recovered_share=recovered_share(misses, lru, belady),
            event_misses=counts[name],
            layer_misses=_per_layer(events, counts[name], topology),
            layer_accesses=layer_accesses,
            **({} if costs is None else _times(costs, counts[name], counts["belady"])),
        )
    return results


def recovered_share_of(
    predictor: Predictor,
    rows: Iterable[SequenceRouting],
    topology: MoeTopology,
    capacity: float | int,
    *,
    how: Reading = "decode",
) -> dict[str, PolicyResult]:
    """Replay sequences under LRU, a predictor's forecasts and the optimum: {"lru", "predicted", "belady"}.

    `["predicted"].recovered_share` is the share of what LRU misses beyond the optimum that the predictor avoids.

    Args:
        rows: sequences that its training has not seen (`foresight.Unseen`).
        capacity: experts that the cache holds: a share below 1, or their number.

    Raises:
        SettingError: if the capacity is impossible, or the predictor cannot foresee such a reading.
        BundleError: if a score is nan or infinite.
    """
    held, whole = num_slots(capacity, topology), list(join_parts(rows))
    events = events_of(whole, topology, how)
    forecasts = forecasts_of(predictor, whole, topology, how)
    foreseen = foreseen_misses(events, [held], topology, forecasts)[held]
    return simulate(events, held, ["lru", "predicted", "belady"], topology, foreseen=foreseen)


def _times(costs: EventCosts, misses: np.ndarray, belady: np.ndarray) -> dict[str, float | None]:
    time = replay_time(costs, misses)
    limit = limit_s(costs, belady)
    return {
        "time_per_token_s": time.per_token_s,
        "stall_s": time.stall_s,
        "measured_over_limit": time.seconds / limit if limit else None,
        "prefetched_time_per_token_s": perfect_prefetch_time(costs, misses).per_token_s,
    }


def _per_layer(events: Events, counts: np.ndarray, topology: MoeTopology) -> np.ndarray:
    return np.bincount(events.layers, weights=counts, minlength=topology.num_layers).astype(np.int64)
