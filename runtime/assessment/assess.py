"""`foregate assess`: every number about one trace, and the verdict, as plain values. Knows no pages or terminals."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, get_args

import numpy as np

from ...collect.errors import SettingError, TraceError
from ...collect.smoke import smoke
from ...collect.topology import MoeTopology
from ...collect.trace import SequenceRouting, Trace
from ..events import Reading, events_of
from ..hardware import HardwareProfile
from ..policies.registry import PolicySetting, make_policy
from ..simulation import early_load, load_of, miss_counts, num_slots
from ..time_model import ModelSizes, event_costs
from .contamination import contamination
from .coverage import hot_set_coverage
from .curves import BASE, EARLY, OTHERS, Replay, capacities_of, miss_curves
from .findings import findings_of, gains_json, machine_json
from .intervals import ratio
from .limits import Limits
from .load import balances, dropped_of
from .load import load_of as expert_load
from .overlap import overlaps
from .sample import Sample, by_stack, draw, fewer
from .signals import free_signals
from .verdict import judge, undecided

log = logging.getLogger(__name__)

NOTHING_USED = "No token of the trace uses an expert: all choices were dropped; record the trace again."
MOST_ACCESSES = 4_000_000  # counted by default: a few seconds, and intervals of about .01
MOST_REPLAYED = 500_000  # replayed by every policy at every capacity: 15 s on one core, 80 s without numba
MOST_STREAMED = 200_000  # replayed for the misses that free signals cover: 2 s


@dataclass(frozen=True, kw_only=True)
class AssessConfig:
    """What to look at, and on which machine."""

    sequences: int | None = None
    """Whole sequences, drawn at random and replayed in full; by default as many as take about a minute."""
    reading: Reading = "decode"
    """decode: every token a step of its own; prefill: every sequence one; recorded: prompts as prefill, rest decode."""
    capacity: float = 0.25
    """Experts in slots: a share below 1, or a number."""
    seed: int = 0
    """Seed of the draw, of random eviction and of the intervals."""

    def __post_init__(self) -> None:
        if self.reading not in get_args(Reading):
            raise SettingError(f"as must be one of {', '.join(get_args(Reading))}, got {self.reading!r}.")
        if self.sequences is not None and self.sequences < 1:
            raise SettingError(f"sequences must be at least 1, got {self.sequences}.")
        if self.seed < 0:
            raise SettingError(f"seed must be at least 0, got {self.seed}.")


def assess(
    trace: Trace, config: AssessConfig, hardware: HardwareProfile | None = None, sizes: ModelSizes | None = None
) -> dict[str, Any]:
    """Assess a trace.

    Args:
        hardware: machine that times are simulated for; None leaves every time null.
        sizes: of the model; by default what the trace knows. Without them, too, every time is null.

    Returns:
        what docs/assess.md lists; plain values without nan.

    Raises:
        TraceError: if the trace is damaged or empty.
        SettingError: if the capacity does not suit it.
    """
    topology, sizes = trace.topology, sizes or ModelSizes.of(trace.topology)
    capacity = num_slots(config.capacity, topology)
    limits = Limits.of(trace.header.notes, config.reading)
    sample = draw(trace, sequences=config.sequences, most_accesses=smoke(MOST_ACCESSES, 200_000), seed=config.seed)
    absent = dropped_of(sample.rows) or 0.0
    if absent == 1.0:
        raise TraceError(NOTHING_USED)
    replayed, replay = None, None
    if limits.replay is None:
        replayed = sample if config.sequences is not None else fewer(sample, smoke(MOST_REPLAYED, 30_000))
        log.info("counting %s; replaying %s", sample.describe(), replayed.describe())
        replay = _replay(sample, replayed, capacity, config, hardware, sizes)
    else:
        log.info("counting %s; replaying nothing: %s", sample.describe(), limits.replay)
    signals = _signals(sample, trace.header.vocab_size, replay, capacity, limits)
    if replay is None:
        verdict, gains = undecided(limits.replay or "", in_steps=limits.layers is None), None
    else:
        found = findings_of(replay, topology, signals, None if hardware is None else hardware.name, absent)
        verdict = judge(found)
        gains = gains_json(found, verdict, replay)
    values = {
        "trace": str(trace.path),
        "model": trace.header.model,
        "topology": topology.describe(),
        "experts": topology.num_experts,
        "as": config.reading,
        "capacity": capacity,
        "capacity_share": capacity / topology.num_experts,
        "notes": [note.to_json() for note in trace.header.notes],
        "limits": limits.to_json(),
        "counted": sample.to_json(),
        "replayed": None if replayed is None else replayed.to_json(),
        "machine": machine_json(replay, hardware, sizes),
        "verdict": verdict.to_json(),
        "gains": gains,
        "curves": None if replay is None else replay.to_json(topology),
        "signals": signals,
        "overlap": overlaps(sample.rows, topology) if limits.tokens is None else [],
        "coverage": hot_set_coverage(sample.rows, topology),
        "load": _load(sample),
        "contamination": _contamination(sample, replayed, replay, limits),
    }
    return plain(values)


def plain(value: Any) -> Any:
    """Give a value as JSON can hold it: no NumPy numbers, tuples or dataclasses, and None in place of nan and inf."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | np.ndarray):
        return [plain(item) for item in value]
    if isinstance(value, np.integer):
        return int(value)
    if isinstance(value, float | np.floating):
        return float(value) if math.isfinite(value) else None
    return value


def _load(sample: Sample) -> dict[str, Any]:
    load_LE = expert_load(sample.rows, sample.topology)
    counts = [load_LE[index, : layer.num_experts] for index, layer in enumerate(sample.topology.layers)]
    return {"counts": counts, "dropped": dropped_of(sample.rows), **balances(load_LE, sample.topology)}


def _contamination(sample: Sample, replayed: Sample | None, replay: Replay | None, limits: Limits) -> dict[str, Any]:
    """Measure repetition in each stack, and LRU's miss rate and the overlap with and without it."""
    stacks, clean = {}, {}
    for stack, rows in by_stack(sample.rows).items():
        # where tokens do not follow one another, their ids are no text that could be repeated
        told = rows if limits.tokens is None else [replace(row, token_ids=None) for row in rows]
        stacks[stack], kept = contamination(told)
        clean |= {(row.sequence, row.stack): row for row in kept}
    if replayed is None or replay is None:
        return {"stacks": stacks, "with": None, "without": None}
    kept = [clean[key] for row in replayed.rows if (key := (row.sequence, row.stack)) in clean]
    topology, linked = replayed.topology, limits.tokens is None
    whole = {
        "lru_miss_rate": ratio(replay.misses(BASE), replay.events.accesses),
        "overlap": _previous(replayed.rows, topology) if linked else None,
    }
    events = events_of(kept, topology, replay.reading)
    cut = {
        "lru_miss_rate": ratio(miss_counts(events, replay.capacity, BASE, topology), events.accesses),
        "overlap": _previous(kept, topology) if linked else None,
    }
    return {"stacks": stacks, "with": whole, "without": cut if events.accesses else None}


def _previous(rows: Sequence[SequenceRouting], topology: MoeTopology) -> float | None:
    return overlaps(rows, topology, [1])[0]["overlap"]


def _replay(
    sample: Sample,
    replayed: Sample,
    capacity: int,
    config: AssessConfig,
    hardware: HardwareProfile | None,
    sizes: ModelSizes,
) -> Replay:
    topology = sample.topology
    events = events_of(replayed.rows, topology, config.reading)
    if not events.accesses:
        raise TraceError(NOTHING_USED)
    names = {row.sequence for row in replayed.rows}
    others = [row for row in sample.rows if row.sequence not in names]
    load = load_of(events_of(others, topology, config.reading), topology) if others else early_load(events, topology)
    counts = miss_curves(events, capacities_of(topology, capacity), topology, load=load, seed=config.seed)
    return Replay(
        events=events,
        reading=config.reading,
        capacity=capacity,
        counts=counts,
        load=load,
        static_fitted_on=OTHERS if others else EARLY,
        costs=None if hardware is None or sizes.missing else event_costs(events, topology, sizes, hardware),
    )


def _signals(
    sample: Sample, vocab_size: int | None, replay: Replay | None, capacity: int, limits: Limits
) -> dict[str, Any]:
    """Measure the free signals of each stack, on the misses of the best free policy with the stack's share of slots."""
    topology, found = sample.topology, {}
    left_out = [name for name, reason in (("previous_token", limits.tokens), ("layer_pair", limits.layers)) if reason]
    for stack, rows in by_stack(sample.rows).items():
        own = sum(topology.layers[layer].num_experts for layer in topology.layers_of(rows[0].stack))
        held = max(1, capacity * own // topology.num_experts)
        policy = None
        if replay is not None and limits.tokens is None:  # the misses to cover are those of tokens one by one
            setting = PolicySetting(topology=topology, capacity=held, load=replay.load)
            policy = partial(make_policy, replay.free, setting)
        found[stack] = {
            "misses_of": None if replay is None or policy is None else replay.free,
            **free_signals(
                rows,
                topology,
                rows[0].stack,
                vocab_size,
                held,
                policy,
                smoke(MOST_STREAMED, 30_000),
                left_out,
            ),
        }
    return found
