"""Replay of `predicted`: the compiled one beside the engine's class, several capacities at once, and shares."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from foregate.collect.errors import SettingError
from foregate.collect.shard import SequenceRouting
from foregate.collect.topology import MoeLayer, MoeTopology
from foregate.predictors.base import PredictorSpec
from foregate.predictors.baselines import Oracle, Popularity
from foregate.runtime import foreseen
from foregate.runtime.events import Events, events_of
from foregate.runtime.forecast import Forecast
from foregate.runtime.foreseen import foreseen_misses
from foregate.runtime.simulation import recovered_share_of, simulate
from hypothesis import given, settings
from hypothesis import strategies as st

TOPOLOGY = MoeTopology(
    layers=tuple(MoeLayer(stack="causal", block=i, num_experts=n, top_k=2) for i, n in enumerate((4, 6, 3)))
)


def drawn_rows(random: np.random.Generator, sequences: int, tokens: int) -> list[SequenceRouting]:
    """Draw sequences, some of them with a prompt and tokens that a layer dropped."""
    rows = []
    for index in range(sequences):
        length = int(random.integers(1, tokens + 1))
        chosen = [np.argsort(random.random((length, n)), axis=1)[:, :2] for n in (4, 6, 3)]
        experts = np.concatenate(chosen, axis=1).astype(np.int16)
        experts[random.random(experts.shape) < 0.1] = -1
        prompt = int(random.integers(0, length + 1))
        rows.append(SequenceRouting(sequence=str(index), experts=experts, prompt_tokens=prompt))
    return rows


def drawn_forecasts(random: np.random.Generator, steps: int, said: float, told: float) -> list[Forecast]:
    """Draw a forecast for a share of the steps, with few distinct values, a share of them with reuse."""
    found = []
    for step in range(steps):
        demand, reuse = random.integers(0, 5, (2, TOPOLOGY.num_experts)).astype(np.float32) / 10
        if random.random() < said:
            found.append(Forecast(step, demand, reuse - 0.2 if random.random() < told else None))
    return found


@given(
    seed=st.integers(0, 1 << 16),
    capacities=st.sets(st.integers(1, 13), min_size=1, max_size=3),
    shares=st.tuples(st.sampled_from([0.0, 0.7, 1.0]), st.sampled_from([0.0, 0.6, 1.0])),
    block=st.sampled_from([1, 3, 256]),
)
@settings(max_examples=100, deadline=None)
def test_compiled_replay_is_the_engines(
    seed: int, capacities: set[int], shares: tuple[float, float], block: int
) -> None:
    pytest.importorskip("numba", reason="numba (foregate[fast]) is not installed")
    random = np.random.default_rng(seed)
    events = events_of(drawn_rows(random, 3, 12), TOPOLOGY, "recorded")
    steps = int(events.steps.max(initial=0)) + 3  # forecasts of forwards that do not exist change nothing
    said = drawn_forecasts(random, steps, *shares)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(foreseen, "BLOCK", block)
        quick = foreseen_misses(events, capacities, TOPOLOGY, said)
        slow = foreseen_misses(events, capacities, TOPOLOGY, iter(said), quick=False)
    assert quick.keys() == slow.keys() == capacities
    for capacity in capacities:
        assert quick[capacity].dtype == slow[capacity].dtype == np.int32
        assert quick[capacity].tolist() == slow[capacity].tolist()


@pytest.mark.parametrize("quick", [True, False])
def test_a_stream_of_forecasts_is_consumed_once_and_block_by_block(quick: bool) -> None:
    events = events_of(drawn_rows(np.random.default_rng(0), 40, 20), TOPOLOGY, "decode")
    steps = int(events.steps[-1]) + 1
    said = drawn_forecasts(np.random.default_rng(1), steps, 1.0, 1.0)
    alive: list[int] = []

    def stream() -> Iterator[Forecast]:
        for forecast in said:
            alive.append(forecast.step)
            yield forecast

    together = foreseen_misses(events, [3, 7], TOPOLOGY, stream(), quick=quick)
    assert alive == list(range(steps))
    for capacity in (3, 7):
        alone = foreseen_misses(events, [capacity], TOPOLOGY, said, quick=quick)
        assert alone[capacity].tolist() == together[capacity].tolist()


def test_disorder_and_capacities_of_nothing_are_refused() -> None:
    events = events_of(drawn_rows(np.random.default_rng(0), 2, 5), TOPOLOGY, "decode")
    zeros = np.zeros(TOPOLOGY.num_experts, np.float32)
    with pytest.raises(SettingError, match="got one of step 3 after one of step 3"):
        foreseen_misses(events, [3], TOPOLOGY, [Forecast(3, zeros), Forecast(3, zeros)])
    with pytest.raises(SettingError, match="capacity must be at least 1 expert, got 0"):
        foreseen_misses(events, [0], TOPOLOGY, [])


def test_simulate_takes_the_misses_and_refuses_the_name_without_them() -> None:
    events = events_of(drawn_rows(np.random.default_rng(2), 3, 12), TOPOLOGY, "decode")
    misses = foreseen_misses(events, [5], TOPOLOGY, [])[5]
    result = simulate(events, 5, ["predicted", "lru"], TOPOLOGY, foreseen=misses)
    assert list(result) == ["predicted", "lru"]
    assert result["predicted"].misses == misses.sum()
    assert result["predicted"].layer_misses.sum() == misses.sum()
    with pytest.raises(SettingError, match="got 'predicted', which evicts by a predictor's forecasts"):
        simulate(events, 5, ["predicted"], TOPOLOGY)


def lingering(sequences: int = 6, tokens: int = 40) -> list[SequenceRouting]:
    """Draw sequences in which each layer's experts stay for a while, and come back."""
    random = np.random.default_rng(5)
    rows = []
    for index in range(sequences):
        liked = [random.permutation(n)[:3] for n in (4, 6, 3)]
        columns = [np.argsort(random.random((tokens, 3)), axis=1)[:, :2] for _ in liked]
        experts = np.concatenate([own[column] for own, column in zip(liked, columns, strict=True)], axis=1)
        rows.append(SequenceRouting(sequence=str(index), experts=experts.astype(np.int16)))
    return rows


def test_a_predictor_that_knows_each_token_beats_one_that_knows_none() -> None:
    rows = lingering()
    spec = PredictorSpec(family="test", horizon="token", topology=TOPOLOGY, stack="causal", vocab_size=9)
    free = recovered_share_of(Popularity(spec).fit(rows), rows, TOPOLOGY, 5)
    shares: list[float] = []
    for row in rows:  # an oracle tells one batch of sequences, from the first
        told = recovered_share_of(Oracle(spec).fit([row]), [row], TOPOLOGY, 5)
        assert list(told) == ["lru", "predicted", "belady"]
        assert told["predicted"].capacity == 5
        assert told["lru"].misses >= told["predicted"].misses >= told["belady"].misses
        shares.append(told["predicted"].recovered_share or 0.0)
    assert free["predicted"].accesses == sum(row.num_tokens * 6 for row in rows)
    assert np.mean(shares) > (free["predicted"].recovered_share or 0.0) + 0.1
    assert recovered_share_of(Popularity(spec).fit(rows), rows, TOPOLOGY, 1.0 - 1e-9)["lru"].capacity == 12


def test_parts_of_a_sequence_are_one_sequence() -> None:
    from dataclasses import replace

    whole = lingering(2)
    parts = [
        replace(row, experts=row.experts[cut], part=part)
        for row in whole
        for part, cut in enumerate((slice(0, 15), slice(15, 40)))
    ]
    spec = PredictorSpec(family="test", horizon="token", topology=TOPOLOGY, stack="causal", vocab_size=9)
    predictor = Popularity(spec).fit(whole)
    one, two = (recovered_share_of(predictor, rows, TOPOLOGY, 4)["predicted"] for rows in (whole, parts))
    assert one.event_misses.tolist() == two.event_misses.tolist()


def test_events_of_no_forwards_have_no_misses() -> None:
    empty: Events = events_of([], TOPOLOGY, "decode")
    for quick in (True, False):
        assert foreseen_misses(empty, [3], TOPOLOGY, [], quick=quick)[3].tolist() == []
