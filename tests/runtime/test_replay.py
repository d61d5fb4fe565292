"""Replay: the README's numbers in small, and the reference counts on real traces."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest
from foregate.collect.trace import Trace
from foregate.runtime.events import Event, events_of
from foregate.runtime.policies import Lru
from foregate.runtime.replay import ReplayResult, recovered_share, replay, replay_belady, replay_lru
from foregate.runtime.simulation import simulate


def one_token(*needed: int) -> Event:
    return Event(needed, True)


def test_a_trace_small_enough_to_follow_by_hand() -> None:
    events = [one_token(1), one_token(2), one_token(3), one_token(1), one_token(3, 9), one_token(2)]
    # capacity 3: 1, 2, 3 enter; 1 hits; of (3, 9) 9 enters and LRU loses 2, which is wanted next, Belady loses 1
    assert replay_lru(events, 3) == ReplayResult(accesses=7, misses=5)
    assert replay_belady(events, 3) == ReplayResult(accesses=7, misses=4)
    assert replay_lru(events, 3).miss_rate == pytest.approx(5 / 7)


def test_an_event_counts_each_expert_once_and_against_the_state_at_its_start() -> None:
    prefill = Event((0, 1, 2, 3), False)
    assert replay([prefill, prefill], 2, Lru()) == ReplayResult(8, 6)  # 2 and 3 stay
    assert replay([], 2, Lru()).miss_rate == 0.0


def test_recovered_share() -> None:
    assert recovered_share(75, lru=100, belady=50) == 0.5
    assert recovered_share(120, lru=100, belady=50) == -0.4
    assert recovered_share(100, lru=100, belady=100) is None


@pytest.mark.parametrize(
    ("name", "sequences", "accesses", "counts"),
    [
        ("mixtral-8x7b-instruct_mtbench", 20, 558_336, {64: (359_836, 229_799), 128: (258_002, 103_365)}),
        ("gpt-oss-20b_mixed", 20, 805_920, {192: (289_640, 134_012), 96: (431_052, 287_678)}),
        ("deepseek-v2-lite-chat_puffin", 80, 854_568, {416: (467_090, 245_553), 208: (625_411, 390_726)}),
    ],
)
def test_reference_counts(
    shared: Path, name: str, sequences: int, accesses: int, counts: dict[int, tuple[int, int]]
) -> None:
    """By the engine's cache and policies, and by what simulation takes, which is compiled where numba is there."""
    trace = Trace.open(shared / "traces" / f"{name}.npz")
    events = events_of(islice(trace, sequences), trace.topology, "decode")
    for capacity, misses in counts.items():
        lru, belady = replay_lru(events, capacity), replay_belady(events, capacity)
        assert lru.accesses == accesses
        assert (lru.misses, belady.misses) == misses
        results = simulate(events, capacity, ["lru", "belady"], trace.topology)
        assert tuple(result.misses for result in results.values()) == misses
