"""From replays and signals to the numbers that the verdict rests on. Knows replays and costs; judges nothing."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...collect.topology import MoeTopology
from ..hardware import HardwareProfile
from ..time_model import ModelSizes, limit_s, perfect_prefetch_time, replay_time
from .curves import BASE, OPTIMUM, Replay, per_sequence
from .gains import Coverage, Misses, largest_gains, token_times
from .intervals import ratio_interval
from .verdict import NOTHING, Findings, Verdict


def findings_of(
    replay: Replay, topology: MoeTopology, signals: dict[str, Any], machine: str | None = None, absent: float = 0.0
) -> Findings:
    """Collect what the verdict rests on; with several stacks, the signals of the one with most MoE layers.

    Args:
        absent: share of the choices that the trace does not hold.
    """
    events, num_tokens = replay.events, replay.events.num_tokens
    misses = Misses(*(replay.misses(name) / num_tokens for name in (BASE, replay.free, OPTIMUM)))
    largest = max(topology.stacks, key=lambda stack: len(topology.layers_of(stack)) if stack in signals else -1)
    measured = signals[largest]["signals"]
    # Where a signal had to be left out, that the others foretell little proves nothing.
    recalls = [] if signals[largest]["left_out"] else [item["recall"] for item in measured.values()]
    # A prefill needs the union of its tokens' experts: what is measured token by token says nothing of it.
    name, coverage = (None, NOTHING) if replay.reading == "prefill" else best_signal(measured)
    times = None
    if replay.costs is not None:
        costs = replay.costs
        on_demand = Misses(*(replay_time(costs, replay.at(name)).per_token_s for name in (BASE, replay.free, OPTIMUM)))
        times = token_times(misses, costs.compute_s / num_tokens, costs.block_s, coverage, on_demand)
    return Findings(
        capacity=replay.capacity,
        num_experts=topology.num_experts,
        misses=misses,
        fits=len(np.unique(events.experts)) <= replay.capacity,
        free_policy=replay.free,
        signal=name,
        coverage=coverage,
        recall=max(recalls, default=None),
        known=measured["popularity"]["recall"] if "popularity" in measured else None,
        times=times,
        machine=machine,
        absent=absent,
    )


def best_signal(measured: dict[str, Any]) -> tuple[str | None, Coverage]:
    """Name the signal that covers most misses with as many fetches as misses, and give what it covers."""
    best: tuple[str | None, Coverage] = (None, NOTHING)
    for name, item in measured.items():
        curve = item["coverage"]
        found = Coverage([at["fetched_per_miss"] for at in curve], [at["covered_misses"] for at in curve])
        if found.at(1.0) > best[1].at(1.0):
            best = name, found
    return best


def gains_json(found: Findings, verdict: Verdict, replay: Replay) -> dict[str, Any]:
    """Give the gains as plain values.

    Returns:
        {"basis": "time" or "misses", "prefetch", "cache", "both" (at most, LRU on demand = 1), "on_any_machine": the
        same three without a machine, "free_policy", "signal", "misses_per_token", "lru_over_belady" and its interval
        over sequences, "tokens_per_s": of each way, None without a machine, "limit_over_resident"}
    """
    assert verdict.gains is not None  # something was replayed
    lru, belady = (per_sequence(replay.events, replay.at(name)) for name in (BASE, OPTIMUM))
    tokens_per_s = None
    if found.times is not None and replay.costs is not None:
        once = perfect_prefetch_time(replay.costs, replay.at(BASE)).per_token_s
        tokens_per_s = {**found.times.to_json(), "lru_prefetched_within_forward": 1 / once}
        limit = limit_s(replay.costs, replay.at(OPTIMUM)) / replay.events.num_tokens
        assert abs(limit - found.times.limit) <= 1e-9 * limit, (limit, found.times.limit)  # one limit in all commands
    return {
        "basis": "misses" if found.times is None else "time",
        **verdict.gains.to_json(),
        "on_any_machine": largest_gains(found.misses).to_json(),
        "free_policy": found.free_policy,
        "signal": found.signal,
        "misses_per_token": found.misses._asdict(),
        "lru_over_belady": found.misses.lru / found.misses.belady if found.misses.belady else None,
        "lru_over_belady_interval": ratio_interval(lru, belady),
        "tokens_per_s": tokens_per_s,
        "limit_over_resident": None if found.times is None else found.times.limit / found.times.resident,
    }


def machine_json(replay: Replay | None, hardware: HardwareProfile | None, sizes: ModelSizes) -> dict[str, Any] | None:
    """Give the machine and the sizes that times are simulated with, or what is missing; None where none was named.

    Args:
        replay: None where nothing was replayed; there are no times then.
    """
    if hardware is None:
        return None
    found: dict[str, Any] = {**hardware.to_json(), "expert_bytes": sizes.expert_bytes, "missing": sizes.missing}
    if replay is not None and replay.costs is not None:
        found["block_ms"] = replay.costs.block_s * 1e3
        found["resident_ms"] = replay.costs.compute_s / replay.events.num_tokens * 1e3
    return found
