"""Replay: the README's numbers in small, the reference counts on real traces, and events from rows."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from foregate.collect.shard import SequenceRouting
from foregate.collect.topology import MoeLayer, MoeTopology
from foregate.collect.trace import Trace
from foregate.runtime.policies import Lru
from foregate.runtime.replay import (
    Event,
    ReplayResult,
    decode_events,
    prefill_events,
    recovered_share,
    replay,
    replay_belady,
    replay_lru,
)

PAIR = MoeTopology(
    layers=(
        MoeLayer(stack="encoder", block=1, num_experts=3, top_k=2),
        MoeLayer(stack="decoder", block=0, num_experts=4, top_k=1),
        MoeLayer(stack="decoder", block=1, num_experts=5, top_k=2),
    )
)


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


def test_rows_become_events_of_their_own_stack() -> None:
    encoder = SequenceRouting(sequence="a", stack="encoder", experts=np.array([[2, 0], [-1, 0]], np.int16))
    decoder = SequenceRouting(sequence="a", stack="decoder", experts=np.array([[3, 4, 0], [-1, -1, -1]], np.int16))
    assert list(decode_events([encoder, decoder], PAIR)) == [
        one_token(0, 2),
        one_token(0),
        one_token(6),
        one_token(7, 11),  # the decoder's second token was dropped everywhere: no event
    ]
    assert list(prefill_events([encoder, decoder], PAIR)) == [
        Event((0, 2), False),
        Event((6,), False),
        Event((7, 11), False),
    ]


def test_a_prefill_of_one_token_is_an_event_of_one_token() -> None:
    row = SequenceRouting(sequence="a", stack="encoder", experts=np.array([[2, 0]], np.int16))
    assert list(prefill_events([row], PAIR)) == [one_token(0, 2)]


def test_events_of_a_token_are_distinct_and_ascending() -> None:
    row = SequenceRouting(sequence="a", stack="encoder", experts=np.array([[1, 1]], np.int16))
    assert list(decode_events([row], PAIR)) == [one_token(1)]


@pytest.mark.parametrize(
    ("name", "sequences", "capacity", "counts"),
    [
        ("mixtral-8x7b-instruct_mtbench", 20, 64, (558_336, 359_836, 229_799)),
        ("gpt-oss-20b_mixed", 20, 96, (805_920, 431_052, 287_678)),
    ],
)
def test_reference_counts(shared: Path, name: str, sequences: int, capacity: int, counts: tuple[int, int, int]) -> None:
    trace = Trace.open(shared / "traces" / f"{name}.npz")
    events = list(decode_events(islice(trace, sequences), trace.topology))
    lru, belady = replay_lru(events, capacity), replay_belady(events, capacity)
    assert (lru.accesses, lru.misses, belady.misses) == counts
