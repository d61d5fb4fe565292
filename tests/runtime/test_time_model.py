"""Simulated time: by hand, beside a slow clockwork, beside the engine on a clock moved by hand, and what must hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from foregate.collect.errors import SettingError
from foregate.collect.topology import MoeTopology
from foregate.runtime.cache import ExpertCache
from foregate.runtime.clock import ManualClock
from foregate.runtime.engine import ExpertEngine
from foregate.runtime.events import Events
from foregate.runtime.hardware import HardwareProfile
from foregate.runtime.policies.registry import SIMULATED, PolicySetting, make_policy
from foregate.runtime.simulation import miss_counts, simulate
from foregate.runtime.time_model import (
    EventCosts,
    ModelSizes,
    event_costs,
    limit_s,
    perfect_prefetch_time,
    replay_time,
)
from foregate.runtime.transfer import InlineTransfers
from foregate.runtime.transfer_queue import Transfer
from hypothesis import given, settings
from hypothesis import strategies as st

TOPOLOGY = MoeTopology.uniform(2, 6, 2, expert_bytes=4_000_000, dense_bytes=2_000_000)
# a block: 1 ms + 4 ms; an expert: 2 ms of reading, 4 of operations; a layer's dense part: .5 or 1, and 1 of overhead
MACHINE = HardwareProfile(
    name="by hand",
    link="a wire",
    link_gb_per_s=1.0,
    link_latency_us=1000.0,
    memory_gb_per_s=2.0,
    compute_tflop_per_s=0.001,
    event_overhead_us=1000.0,
    cores=2,
)


def costs_of(
    needs: Sequence[int],
    *,
    dense: float = 1.0,
    expert: float = 2.0,
    block: float = 5.0,
    steps: Sequence[int] | None = None,
) -> EventCosts:
    count = len(needs)
    return EventCosts(
        dense_s=np.full(count, dense),
        expert_s=np.full(count, expert),
        needs=np.array(needs, np.int64),
        steps=np.arange(count) if steps is None else np.array(steps),
        block_s=block,
        num_tokens=max(1, count),
    )


def events_of_layers(needed: Sequence[Sequence[int]], tokens: Sequence[int] | None = None) -> Events:
    """Give events that go through the two layers in turn."""
    count = len(needed)
    return Events(
        experts=np.array([expert for event in needed for expert in event], np.int32),
        starts=np.cumsum([0, *map(len, needed)]),
        layers=np.arange(count, dtype=np.int32) % 2,
        steps=np.arange(count) // 2,
        tokens=np.array(tokens or [1] * count, np.int32),
        sequences=np.zeros(count, np.int32),
        num_tokens=(count + 1) // 2,
    )


@pytest.mark.parametrize(
    ("needs", "misses", "experts_s", "stall"),
    [
        (3, 0, 6.0, 0.0),
        (3, 1, 7.0, 1.0),  # 0-4 two residents, the block arrives at 5, computed until 7
        (1, 1, 7.0, 5.0),
        (2, 2, 12.0, 8.0),  # blocks at 5 and 10
        (6, 2, 12.0, 0.0),  # 0-8 four residents, the first block is there, 8-10, the second just is: 10-12
        (4, 2, 12.0, 4.0),
    ],
)
def test_an_event_by_hand(needs: int, misses: int, experts_s: float, stall: float) -> None:
    time = replay_time(costs_of([needs]), np.array([misses]))
    assert (time.seconds, time.stall_s, time.compute_s) == (1.0 + experts_s, stall, 1.0 + 2.0 * needs)


def test_where_blocks_come_faster_than_they_are_computed_only_the_first_is_waited_for() -> None:
    time = replay_time(costs_of([3], expert=5.0, block=2.0), np.array([3]))
    assert (time.seconds, time.stall_s) == (1.0 + 2.0 + 15.0, 2.0)


def test_prefetching_within_a_forward_by_hand() -> None:
    # one forward of two layers, one miss each: blocks arrive at 5 and 10
    # layer 0: dense until 1, one resident until 3, the miss 5-7; layer 1: dense until 8, resident until 10, miss 10-12
    costs, misses = costs_of([2, 2], steps=[0, 0]), np.array([1, 1])
    time = perfect_prefetch_time(costs, misses)
    assert (time.seconds, time.stall_s) == (12.0, 2.0)
    assert replay_time(costs, misses).seconds == 16.0
    # as two forwards the second block is only read from the second one on, while its dense part is computed
    apart = perfect_prefetch_time(costs_of([2, 2], steps=[3, 7]), misses)
    assert apart.seconds == 2 * 7.0


def test_costs_by_hand() -> None:
    events = events_of_layers([[0, 1], [6, 7, 8]], tokens=[1, 6])
    sizes = ModelSizes.of(TOPOLOGY)
    costs = event_costs(events, TOPOLOGY, sizes, MACHINE)
    assert costs.block_s == pytest.approx(0.005)
    # tokens x 1 MB x 1 operation a byte at 10^9 a second; 6 x 2 / 3 tokens of each expert x 4 MB
    assert costs.dense_s == pytest.approx([0.001 + 0.001, 0.001 + 0.006])
    assert costs.expert_s == pytest.approx([0.004, 0.016])  # one token of an expert: 4 ms of operations, 2 ms of bytes
    assert costs.compute_s == pytest.approx(0.002 + 2 * 0.004 + 0.007 + 3 * 0.016)
    wide = event_costs(events, TOPOLOGY, ModelSizes(expert_bytes=4e6, dense_s=0.004, bytes_per_parameter=8.0), MACHINE)
    assert wide.expert_s == pytest.approx([0.002, 0.004])  # a quarter of the operations
    assert wide.dense_s == pytest.approx([0.003, 0.001 + 0.006])  # 4 ms are 8 MB: 2 ms a layer, or 6 x 4 MB x 1/4


def test_the_limit_is_compute_or_the_link() -> None:
    assert limit_s(costs_of([2, 2]), np.array([1, 0])) == 10.0
    assert limit_s(costs_of([2, 2]), np.array([2, 2])) == 20.0


def test_without_sizes_there_is_no_time() -> None:
    events = events_of_layers([[0], [6]])
    assert ModelSizes(expert_bytes=None).missing == ["bytes of an expert", "dense part"]
    with pytest.raises(SettingError, match="needs the dense part; give them with --expert-mib and --dense-ms"):
        event_costs(events, TOPOLOGY, ModelSizes(expert_bytes=1.0), MACHINE)
    unknown = simulate(events, 2, ["lru"], MoeTopology.uniform(2, 6, 2), hardware=MACHINE)["lru"]
    assert (unknown.time_per_token_s, unknown.stall_s, unknown.measured_over_limit) == (None, None, None)
    known = simulate(events, 2, ["lru"], TOPOLOGY, hardware=MACHINE)["lru"]
    # per event 2 ms, then a block of 5 ms and 4 ms of computing it; the limit is the link's 10 ms or 12 of compute
    assert known.time_per_token_s == pytest.approx(2 * 0.011)
    assert known.stall_s == pytest.approx(0.010)
    assert known.measured_over_limit == pytest.approx(0.022 / 0.012)
    # the first block arrives at 5 ms and is computed until 9, the second arrives at 10, within a dense part until 11
    assert known.prefetched_time_per_token_s == pytest.approx(0.015)


@pytest.mark.parametrize(
    "sizes",
    [{"expert_bytes": 0}, {"expert_bytes": float("nan")}, {"expert_bytes": 1, "dense_s": -1}],
)
def test_impossible_sizes_are_refused(sizes: dict[str, Any]) -> None:
    with pytest.raises(SettingError, match="must be a"):
        ModelSizes(**sizes)


@st.composite
def drawn(draw: st.DrawFn) -> tuple[EventCosts, np.ndarray]:
    needs = draw(st.lists(st.integers(1, 6), min_size=1, max_size=12))
    misses = [draw(st.integers(0, count)) for count in needs]
    steps = np.cumsum([draw(st.integers(0, 2)) for _ in needs])
    numbers = st.sampled_from([0.0, 0.25, 0.5, 1.0, 3.0])
    dense, expert = ([draw(numbers) for _ in needs] for _ in range(2))
    costs = EventCosts(
        dense_s=np.array(dense),
        expert_s=np.array(expert),
        needs=np.array(needs),
        steps=steps,
        block_s=draw(st.sampled_from([0.25, 1.0, 2.5])),
        num_tokens=7,
    )
    return costs, np.array(misses)


def clockwork(costs: EventCosts, misses: np.ndarray, *, prefetch: bool) -> float:
    """Move a clock from product to product."""
    now = 0.0
    start_of_forward, read = 0.0, 0
    for event in range(len(misses)):
        if event == 0 or costs.steps[event] != costs.steps[event - 1]:
            start_of_forward, read = now, 0
        now += costs.dense_s[event]
        if not prefetch:
            start_of_forward, read = now, 0
        arrivals = [start_of_forward + (read + 1 + index) * costs.block_s for index in range(misses[event])]
        read += misses[event]
        now += (costs.needs[event] - misses[event]) * costs.expert_s[event]
        for arrival in arrivals:
            now = max(now, arrival) + costs.expert_s[event]
    return now


@given(drawn())
@settings(max_examples=200, deadline=None)
def test_formulas_agree_with_a_clock(case: tuple[EventCosts, np.ndarray]) -> None:
    costs, misses = case
    demand, ahead = replay_time(costs, misses), perfect_prefetch_time(costs, misses)
    assert demand.seconds == pytest.approx(clockwork(costs, misses, prefetch=False), abs=1e-12)
    assert ahead.seconds == pytest.approx(clockwork(costs, misses, prefetch=True), abs=1e-12)
    assert demand.per_token_s == demand.seconds / 7


@given(drawn(), st.integers(0, 11))
@settings(max_examples=200, deadline=None)
def test_what_must_hold(case: tuple[EventCosts, np.ndarray], where: int) -> None:
    costs, misses = case
    demand, ahead = replay_time(costs, misses), perfect_prefetch_time(costs, misses)
    close = 1 + 1e-12
    assert costs.compute_s <= ahead.seconds * close <= demand.seconds * close**2
    assert limit_s(costs, misses) <= ahead.seconds * close, "no forward reads before it has started"
    fewer = misses.copy()
    fewer[where % len(misses)] = max(0, fewer[where % len(misses)] - 1)
    for time in (replay_time, perfect_prefetch_time):
        assert time(costs, fewer).seconds <= time(costs, misses).seconds * close
        slower = EventCosts(**{**vars(costs), "block_s": 2 * costs.block_s})
        assert time(slower, misses).seconds * close >= time(costs, misses).seconds
        assert time(costs, 0 * misses).stall_s == 0.0


class Wire(InlineTransfers):
    """One link on a clock moved by hand: one block after the other, in the order of submission."""

    def __init__(self, clock: ManualClock, block_s: float) -> None:
        super().__init__(clock=clock)
        self.clock, self.block_s, self.free_at = clock, block_s, 0.0
        self.arrival: dict[int, float] = {}

    def submit(self, expert: int, slot: int, *, demand: bool) -> Transfer:
        transfer = super().submit(expert, slot, demand=demand)
        self.free_at = max(self.free_at, self.clock.now()) + self.block_s
        self.arrival[id(transfer)] = self.free_at
        return transfer

    def wait_any(self, transfers: Sequence[Transfer]) -> Transfer:
        first = min(transfers, key=lambda transfer: self.arrival[id(transfer)])
        self.clock.advance(max(0.0, self.arrival[id(first)] - self.clock.now()))
        self.finish(first)
        return super().wait_any([first])


@pytest.mark.parametrize("policy", SIMULATED)
@given(
    needed=st.lists(st.sets(st.integers(0, 5), min_size=1, max_size=4), min_size=1, max_size=30),
    capacity=st.integers(4, 9),
    expert_s=st.sampled_from([0.25, 2.0, 8.0]),
)
@settings(max_examples=25, deadline=None)
def test_simulated_hits_misses_and_stalls_are_the_engines(
    policy: str, needed: list[set[int]], capacity: int, expert_s: float
) -> None:
    events = events_of_layers([sorted(6 * (i % 2) + expert for expert in event) for i, event in enumerate(needed)])
    load = np.arange(12) % 5
    future = [event.needed for event in events]
    setting = PolicySetting(topology=TOPOLOGY, capacity=capacity, future=future, load=load)
    clock = ManualClock()
    made = make_policy(policy, setting)
    engine = ExpertEngine(TOPOLOGY, ExpertCache(capacity, made), Wire(clock, 5.0), clock)
    for layer, event in zip(events.layers.tolist(), events, strict=True):
        clock.advance(1.0)
        with engine.acquire(layer, event.needed, one_token=event.one_token) as experts:
            for _ in experts:
                clock.advance(expert_s)
    misses = miss_counts(events, capacity, policy, TOPOLOGY, load=load)
    costs = EventCosts(
        dense_s=np.ones(len(events)),
        expert_s=np.full(len(events), expert_s),
        needs=events.needs,
        steps=events.steps,
        block_s=5.0,
        num_tokens=events.num_tokens,
    )
    time = replay_time(costs, misses)
    assert engine.counters.misses == misses.sum()
    assert engine.counters.hits == events.accesses - misses.sum()
    assert engine.counters.stall_s == pytest.approx(time.stall_s, abs=1e-9)
    assert clock.now() == pytest.approx(time.seconds, abs=1e-9)
