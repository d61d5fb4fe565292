"""One contract over every eviction policy, and Belady beside a search through all choices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import combinations

import numpy as np
import pytest
from foregate.collect.topology import MoeTopology
from foregate.runtime import policies
from foregate.runtime.policies import Belady, EvictionPolicy, Lru, Predicted
from foregate.runtime.replay import Event, replay
from hypothesis import given, settings
from hypothesis import strategies as st

TOPOLOGY = MoeTopology.uniform(2, 4, 2)  # flat indices 0..3 and 4..7
Build = Callable[[Sequence[Sequence[int]]], EvictionPolicy]

POLICIES: dict[str, Build] = {
    "Lru": lambda future: Lru(),
    "Belady": Belady,
    "Predicted": lambda future: Predicted(TOPOLOGY),
}
assert set(POLICIES) == set(policies.__all__) - {"EvictionPolicy"}

# each event is of one layer, as in a model
layer_events = st.tuples(st.sampled_from([0, 4]), st.sets(st.integers(0, 3), min_size=1)).map(
    lambda drawn: sorted(drawn[0] + expert for expert in drawn[1])
)
traces = st.lists(layer_events, min_size=1, max_size=12)


class Driven:
    """A policy that is used as a cache uses it; everything it says is checked against the plain set of residents."""

    def __init__(self, build: Build, trace: Sequence[Sequence[int]], capacity: int) -> None:
        self.policy, self.capacity = build(trace), capacity
        self.resident: set[int] = set()
        self.said: list[list[int]] = []

    def event(self, number: int, needed: Sequence[int], demand: np.ndarray | None = None) -> None:
        self.policy.foresee(demand, acting=True)
        self.policy.use(needed, number)
        self.resident |= set(needed)
        assert self.policy.tracked() == self.resident
        protected = frozenset(needed)
        victims = self.policy.victims(max(0, len(self.resident) - self.capacity), protected)
        self.said.append(victims)
        assert self.policy.tracked() == self.resident, "naming is not removing"
        for victim in victims:
            self.policy.remove(victim)
            self.resident.remove(victim)


def never_names_protected(build: Build, trace: list[list[int]]) -> None:
    driven = Driven(build, trace, 2)
    for number, needed in enumerate(trace, start=1):
        driven.event(number, needed)
        assert not set(driven.said[-1]) & set(needed)


def names_distinct_tracked_experts(build: Build, trace: list[list[int]]) -> None:
    driven = Driven(build, trace, 1)
    for number, needed in enumerate(trace, start=1):
        before = driven.resident | set(needed)
        driven.event(number, needed)
        assert len(driven.said[-1]) == len(set(driven.said[-1]))
        assert set(driven.said[-1]) <= before


def names_all_it_can(build: Build, trace: list[list[int]]) -> None:
    driven = Driven(build, trace, 3)
    for number, needed in enumerate(trace, start=1):
        driven.event(number, needed)
        protected = frozenset(needed[:1])
        for count in range(10):
            victims = driven.policy.victims(count, protected)
            assert len(victims) == min(count, len(driven.resident - protected))


def ranks_once_and_for_all(build: Build, trace: list[list[int]]) -> None:
    """Fewer victims are the first of more: a ranking, whatever the count."""
    driven = Driven(build, trace, 4)
    for number, needed in enumerate(trace, start=1):
        driven.event(number, needed)
        everyone = driven.policy.victims(99, frozenset())
        assert set(everyone) == driven.resident
        for count in range(len(everyone)):
            assert driven.policy.victims(count, frozenset()) == everyone[:count]


def is_deterministic(build: Build, trace: list[list[int]]) -> None:
    first, second = Driven(build, trace, 2), Driven(build, trace, 2)
    for number, needed in enumerate(trace, start=1):
        demand = np.full(TOPOLOGY.num_experts, 0.25, np.float32)
        first.event(number, needed, demand)
        second.event(number, needed, demand)
    assert first.said == second.said


def forgets_removed(build: Build, trace: list[list[int]]) -> None:
    driven = Driven(build, trace, 8)
    for number, needed in enumerate(trace, start=1):
        driven.event(number, needed)
    for expert in sorted(driven.resident):
        driven.policy.remove(expert)
        driven.policy.remove(expert)  # unknown experts are ignored
        assert expert not in driven.policy.victims(99, frozenset())
        assert expert not in driven.policy.tracked()


def breaks_ties_by_the_smallest(build: Build, trace: list[list[int]]) -> None:
    """Used in the same event and never again, experts leave in ascending order."""
    policy = build([[0, 1, 2, 3]])
    policy.use([0, 1, 2, 3], 1)
    assert policy.victims(4, frozenset()) == [0, 1, 2, 3]
    assert policy.victims(2, frozenset([0])) == [1, 2]


CHECKS = [
    never_names_protected,
    names_distinct_tracked_experts,
    names_all_it_can,
    ranks_once_and_for_all,
    is_deterministic,
    forgets_removed,
    breaks_ties_by_the_smallest,
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("name", sorted(POLICIES))
@given(trace=traces)
@settings(max_examples=15, deadline=None)
def test_policy(name: str, check: Callable[[Build, list[list[int]]], None], trace: list[list[int]]) -> None:
    check(POLICIES[name], trace)


def test_lru_takes_the_smallest_last_event_then_the_smallest_expert() -> None:
    policy = Lru()
    policy.use([2, 5], 1)
    policy.use([0, 7], 2)
    policy.use([5], 3)
    assert policy.victims(9, frozenset()) == [2, 0, 7, 5]


def test_belady_takes_the_farthest_next_event_then_the_smallest_expert() -> None:
    future = [[0, 1, 2, 3, 4], [1], [3], [1, 3], [0]]
    policy = Belady(future)
    policy.use(future[0], 1)
    assert policy.victims(5, frozenset()) == [2, 4, 0, 3, 1]  # 2 and 4 are never used again
    policy.use(future[1], 2)
    assert policy.victims(3, frozenset([2])) == [4, 0, 1]


def test_predicted_follows_the_forecast_for_layers_ahead_only() -> None:
    policy = Predicted(TOPOLOGY)
    policy.use([0, 1, 2, 3], 1)
    policy.use([4, 5, 6, 7], 2)
    demand = np.array([0.9, 0, 0, 0, 0, 0.8, 0.1, 0.7], np.float32)
    policy.foresee(demand, acting=True)
    policy.use([0, 1], 3)  # layer 0: what is ahead is layer 1
    assert policy.victims(8, frozenset()) == [2, 3, 4, 0, 1, 6, 7, 5]
    policy.use([4], 4)  # layer 1: nothing is ahead any more
    assert policy.victims(3, frozenset()) == [2, 3, 5]


def test_predicted_is_lru_where_forecasts_are_not_acted_on() -> None:
    predicted, lru = Predicted(TOPOLOGY), Lru()
    for number, needed in enumerate(([1, 3], [4, 6], [0, 3], [5, 6], [1])):
        predicted.foresee(np.ones(8, np.float32), acting=False)
        for policy in (predicted, lru):
            policy.use(needed, number)
        assert predicted.victims(9, frozenset([4])) == lru.victims(9, frozenset([4]))


def fewest_misses(events: list[Event], capacity: int) -> int:
    """Search all choices of who leaves, event by event."""

    @cache
    def search(index: int, resident: frozenset[int]) -> int:
        if index == len(events):
            return 0
        needed = frozenset(events[index].needed)
        present = resident | needed
        misses = len(needed - resident)
        if len(present) <= capacity:
            return misses + search(index + 1, present)
        kept = needed if events[index].one_token and len(needed) <= capacity else frozenset()
        others = sorted(present - kept)
        return misses + min(
            search(index + 1, kept | frozenset(chosen)) for chosen in combinations(others, capacity - len(kept))
        )

    return search(0, frozenset())


@given(
    drawn=st.lists(st.tuples(st.sets(st.integers(0, 6), min_size=1, max_size=4), st.booleans()), max_size=9),
    capacity=st.integers(1, 4),
)
@settings(max_examples=80, deadline=None)
def test_belady_is_optimal(drawn: list[tuple[set[int], bool]], capacity: int) -> None:
    events = [Event(tuple(sorted(needed)), one_token) for needed, one_token in drawn]
    belady = replay(events, capacity, Belady([event.needed for event in events]))
    assert belady.misses == fewest_misses(events, capacity)
    assert replay(events, capacity, Lru()).misses >= belady.misses
