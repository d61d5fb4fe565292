"""Simulation: what is counted, what a policy is fitted on and told, and which capacities are legal."""

from __future__ import annotations

import numpy as np
import pytest
from foregate.collect.errors import SettingError
from foregate.collect.shard import SequenceRouting
from foregate.collect.topology import MoeTopology
from foregate.runtime import simulation
from foregate.runtime.events import Events, events_of
from foregate.runtime.policies.registry import SIMULATED
from foregate.runtime.simulation import early_load, load_of, miss_counts, num_slots, simulate

TOPOLOGY = MoeTopology.uniform(2, 4, 2)  # flat indices 0..3 and 4..7


def events_of_rows(*rows: list[list[int]]) -> Events:
    made = [SequenceRouting(sequence=str(index), experts=np.array(row, np.int16)) for index, row in enumerate(rows)]
    return events_of(made, TOPOLOGY, "decode")


@pytest.fixture(params=["compiled", "python"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run every test in both ways of replay."""
    if request.param == "python":
        monkeypatch.setattr(simulation, "replays", dict)
    return request.param


def test_misses_are_counted_by_event_and_by_layer() -> None:
    # capacity 4, two layers in turn: [0 1] [4 5] miss | [0 1] hits, [4 6] misses 6 for 5, the oldest | all hit
    events = events_of_rows([[0, 1, 0, 1], [0, 1, 0, 2], [0, 1, 0, 2]])
    result = simulate(events, 4, ["lru"], TOPOLOGY)["lru"]
    assert result.event_misses.tolist() == [2, 2, 0, 1, 0, 0]
    assert result.layer_misses.tolist() == [2, 3]
    assert result.layer_accesses.tolist() == [6, 6]
    assert (result.accesses, result.misses, result.miss_rate, result.capacity) == (12, 5, 5 / 12, 4)
    assert miss_counts(events, 4, "lru", TOPOLOGY).tolist() == result.event_misses.tolist()


def test_shares_are_between_lru_and_belady_whatever_is_asked_for() -> None:
    random = np.random.default_rng(0)
    events = events_of_rows(*(random.integers(0, 4, (20, 4)).tolist() for _ in range(3)))
    results = simulate(events, 3, SIMULATED, TOPOLOGY)
    assert list(results) == list(SIMULATED)
    assert (results["lru"].recovered_share, results["belady"].recovered_share) == (0.0, 1.0)
    lru, belady = results["lru"].misses, results["belady"].misses
    for name, result in results.items():
        assert result.misses >= belady
        assert result.recovered_share == (lru - result.misses) / (lru - belady)
        alone = simulate(events, 3, [name], TOPOLOGY)
        assert list(alone) == [name]
        assert alone[name].recovered_share == result.recovered_share
    everything = simulate(events, 8, ["lru", "random"], TOPOLOGY)
    assert everything["random"].recovered_share is None
    assert everything["random"].misses == len(np.unique(events.experts)), "cold misses alone"


def test_a_static_policy_is_fitted_on_the_first_fifth_unless_told() -> None:
    early = [[2, 3, 0, 1]] * 2
    events = events_of_rows(early + [[0, 1, 2, 3]] * 8)
    assert early_load(events, TOPOLOGY).tolist() == [0, 0, 2, 2, 2, 2, 0, 0]
    assert load_of(events, TOPOLOGY).tolist() == [8, 8, 2, 2, 2, 2, 8, 8]
    # capacity 6 holds four hot experts and one token's two: what is hot early stays for nothing
    wrong = miss_counts(events, 6, "static", TOPOLOGY)
    assert wrong.sum() == 4 + 2 * 16  # after the four cold ones every expert passes through, each time
    right = miss_counts(events, 6, "static", TOPOLOGY, load=load_of(events, TOPOLOGY))
    assert right.sum() == 8


def test_activation_is_told_where_a_sequence_begins() -> None:
    first = [[0, 1, 0, 1]] * 6
    second = [[2, 3, 0, 1], [0, 2, 0, 1], [2, 3, 0, 1]]
    one, two = events_of_rows(first + second), events_of_rows(first, second)
    assert one.experts.tolist() == two.experts.tolist()
    counts = [miss_counts(events, 4, "activation", TOPOLOGY).tolist() for events in (one, two)]
    assert counts[0] != counts[1]
    for policy in ("lru", "lfu", "lfru", "s3fifo", "layer_lru", "belady"):
        assert miss_counts(one, 4, policy, TOPOLOGY).tolist() == miss_counts(two, 4, policy, TOPOLOGY).tolist()


def test_random_repeats_with_its_seed() -> None:
    random = np.random.default_rng(1)
    events = events_of_rows(random.integers(0, 4, (60, 4)).tolist())
    runs = [miss_counts(events, 3, "random", TOPOLOGY, seed=seed).tolist() for seed in (0, 0, 1)]
    assert runs[0] == runs[1] != runs[2]


@pytest.mark.parametrize(("capacity", "slots"), [(0.25, 2), (0.3, 2), (0.99, 7), (1, 1), (8, 8), (3.0, 3)])
def test_capacities_are_shares_rounded_down_or_numbers(capacity: float, slots: int) -> None:
    assert num_slots(capacity, TOPOLOGY) == slots


@pytest.mark.parametrize("capacity", [0, -1, 9, 0.1, 2.5, float("nan"), float("inf")])
def test_impossible_capacities_are_refused(capacity: float) -> None:
    with pytest.raises(SettingError, match=f"a share of the 8 experts .* got {capacity}"):
        num_slots(capacity, TOPOLOGY)


def test_unknown_policies_and_capacities_of_nothing_are_refused() -> None:
    events = events_of_rows([[0, 1, 0, 1]])
    with pytest.raises(SettingError, match="did you mean 's3fifo'"):
        simulate(events, 2, ["s3-fifo"], TOPOLOGY)
    with pytest.raises(SettingError, match="got 'predicted', which evicts by a predictor's forecasts"):
        miss_counts(events, 2, "predicted", TOPOLOGY)
    with pytest.raises(SettingError, match="capacity must be at least 1 expert, got 0"):
        miss_counts(events, 0, "lru", TOPOLOGY)


def test_no_events_miss_nothing() -> None:
    results = simulate(events_of_rows(), 2, SIMULATED, TOPOLOGY)
    assert {result.misses for result in results.values()} == {0}
    assert {result.miss_rate for result in results.values()} == {0.0}
