"""Simulated time of a replay: compute, one link, and their overlap. Knows misses and seconds; no tensors or caches.

An event first computes the dense part of its layer. Then its experts are known: the link reads the misses in order, one
block after the other, while resident experts are computed, then each miss as it arrives. With h hits, m misses, c
seconds to compute one expert and b seconds to read one block the experts are done after

    max((h + m) c,  b + m c,  m b + c)        and (h + m) c where nothing is missed,

since all that can hold up the last product is compute alone, the first block before all products of misses, or all
blocks before one product. What is beyond (h + m) c is stall. docs/simulation.md derives it and says what is left out.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..collect.errors import SettingError
from ..collect.topology import MoeTopology
from .events import Events
from .hardware import HardwareProfile, check_number

# N events, L MoE layers


@dataclass(frozen=True, kw_only=True)
class ModelSizes:
    """Hold what time depends on of a model; None where it is not known, and then there are no times."""

    expert_bytes: float | None
    """Bytes of one expert as it is stored, moved and read."""
    dense_bytes: float | None = None
    """Bytes of dense parameters that a forward reads."""
    dense_s: float | None = None
    """Seconds of the dense part of a forward of one token, instead of its bytes."""
    bytes_per_parameter: float = 2.0
    """Bytes of one parameter; 2 for bfloat16. It only counts where operations, not bytes, take longest."""

    def __post_init__(self) -> None:
        for name in ("expert_bytes", "dense_bytes", "dense_s", "bytes_per_parameter"):
            if getattr(self, name) is not None:
                check_number(name, getattr(self, name), positive=not name.startswith("dense"))

    @classmethod
    def of(cls, topology: MoeTopology) -> ModelSizes:
        """Take the sizes that a trace's topology knows."""
        return cls(expert_bytes=topology.expert_bytes, dense_bytes=topology.dense_bytes)

    @property
    def missing(self) -> list[str]:
        """Name what would have to be known for times."""
        found = ["bytes of an expert"] if self.expert_bytes is None else []
        return found + (["dense part"] if self.dense_bytes is None and self.dense_s is None else [])


@dataclass(frozen=True, kw_only=True, eq=False)
class EventCosts:
    """Hold the seconds that events take on a machine, whatever the cache does."""

    dense_s: np.ndarray
    """float64 [N], dense part of the event's layer and fixed overhead."""
    expert_s: np.ndarray
    """float64 [N], one expert's products for the tokens of the event."""
    needs: np.ndarray
    """int64 [N], experts needed."""
    steps: np.ndarray
    """int64 [N], number of the forward, ascending."""
    block_s: float
    """One block over the link."""
    num_tokens: int
    """Tokens of all events."""

    @property
    def compute_s(self) -> float:
        """Seconds of compute alone: the time of a resident model."""
        return float((self.dense_s + self.needs * self.expert_s).sum())


@dataclass(frozen=True, kw_only=True)
class ReplayTime:
    """Say how long a replay took."""

    seconds: float
    """All of it."""
    compute_s: float
    """Compute, dense parts and overhead included."""
    stall_s: float
    """Compute that waited for experts."""
    num_tokens: int
    """Tokens computed."""

    @property
    def per_token_s(self) -> float:
        """Seconds per token."""
        return self.seconds / max(1, self.num_tokens)


def event_costs(events: Events, topology: MoeTopology, sizes: ModelSizes, hardware: HardwareProfile) -> EventCosts:
    """Give what each event costs: a product takes as long as reading its weights or as its operations.

    A layer's dense part is an equal share of the model's. A token costs 2 operations per parameter; an event's tokens
    are taken to spread evenly over the experts that it needs.

    Raises:
        SettingError: if a size is not known.
    """
    if sizes.missing:
        missing = " and the ".join(sizes.missing)
        raise SettingError(f"Simulated time needs the {missing}; give them with --expert-mib and --dense-ms.")
    assert sizes.expert_bytes is not None
    memory, rate = hardware.memory_gb_per_s * 1e9, hardware.compute_tflop_per_s * 1e12
    flop_per_byte = 2.0 / sizes.bytes_per_parameter  # and token
    dense_bytes = sizes.dense_bytes if sizes.dense_s is None else sizes.dense_s * memory
    assert dense_bytes is not None
    dense_bytes /= topology.num_layers
    needs = events.needs
    tokens = events.tokens.astype(np.float64)
    chosen = np.array([layer.top_k for layer in topology.layers])[events.layers]
    per_expert = tokens * np.minimum(1.0, chosen / needs)  # fewer are needed than chosen where some were dropped
    return EventCosts(
        dense_s=dense_bytes * np.maximum(1 / memory, tokens * flop_per_byte / rate) + hardware.event_overhead_us * 1e-6,
        expert_s=sizes.expert_bytes * np.maximum(1 / memory, per_expert * flop_per_byte / rate),
        needs=needs,
        steps=events.steps,
        block_s=hardware.block_s(sizes.expert_bytes),
        num_tokens=events.num_tokens,
    )


def replay_time(costs: EventCosts, misses: np.ndarray) -> ReplayTime:
    """Give the time of a replay that reads on demand, resident experts first.

    Args:
        misses: [N], misses of each event.
    """
    compute, block, expert = costs.needs * costs.expert_s, costs.block_s, costs.expert_s
    experts = np.maximum(compute, np.maximum(block + misses * expert, misses * block + expert))
    stall = np.where(misses > 0, experts - compute, 0.0)
    return _time(costs, float(stall.sum()))


def perfect_prefetch_time(costs: EventCosts, misses: np.ndarray) -> ReplayTime:
    """Give the time if every forward knew from its start which of its experts will be missed.

    The same misses are read as without prefetching, in the order of the layers, but from the start of their forward on
    and without a pause, so that they overlap with everything that is computed before they are needed. A place for each
    is taken to be free, no forward reads for a later one, and nothing is read in vain: no prefetching of the present
    forward's experts can beat it with this sequence of misses.

    Args:
        misses: [N], misses of each event.
    """
    step, places = _places(costs.steps)
    expert = costs.expert_s
    order = np.argsort(places, kind="stable")
    bounds = np.searchsorted(places[order], np.arange(int(places.max(initial=-1)) + 2))
    clock = np.zeros(int(step.max(initial=-1)) + 1)  # since the start of each forward
    read = np.zeros(len(clock))  # blocks that its link has been given
    stall = 0.0
    for place in range(len(bounds) - 1):  # all forwards at once, event by event
        chosen = order[bounds[place] : bounds[place + 1]]
        forward, missed, one = step[chosen], misses[chosen], expert[chosen]
        done = clock[forward] + costs.dense_s[chosen] + costs.needs[chosen] * one
        first = (read[forward] + 1) * costs.block_s + missed * one
        read[forward] += missed
        last = read[forward] * costs.block_s + one
        end = np.where(missed > 0, np.maximum(done, np.maximum(first, last)), done)
        stall += float((end - done).sum())
        clock[forward] = end
    return _time(costs, stall)


def limit_s(costs: EventCosts, belady_misses: np.ndarray) -> float:
    """Give the limit of a run: compute alone, or the optimum's misses read one after the other, if that is longer."""
    return max(costs.compute_s, int(belady_misses.sum()) * costs.block_s)


def _places(steps: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Give each event's forward, numbered without gaps, and its place inside it."""
    index = np.arange(len(steps))
    begins = np.diff(steps, prepend=-1) != 0
    return np.cumsum(begins) - 1, index - np.maximum.accumulate(np.where(begins, index, 0))


def _time(costs: EventCosts, stall: float) -> ReplayTime:
    compute = costs.compute_s
    return ReplayTime(seconds=compute + stall, compute_s=compute, stall_s=stall, num_tokens=costs.num_tokens)
