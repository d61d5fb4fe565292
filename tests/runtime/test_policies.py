"""One contract over every eviction policy, and their names."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from foregate.collect.errors import SettingError
from foregate.collect.topology import MoeTopology
from foregate.runtime import policies
from foregate.runtime.forecast import Forecast
from foregate.runtime.policies import (
    EvictionPolicy,
    Random,
    Static,
)
from foregate.runtime.policies.registry import POLICIES, PolicyName, PolicySetting, make_policy
from hypothesis import given, settings
from hypothesis import strategies as st

TOPOLOGY = MoeTopology.uniform(2, 4, 2)  # flat indices 0..3 and 4..7
LOAD = np.array([5, 0, 2, 2, 9, 1, 0, 3])
Build = Callable[[Sequence[Sequence[int]], int], EvictionPolicy]


def build_of(name: PolicyName) -> Build:
    def build(future: Sequence[Sequence[int]], capacity: int) -> EvictionPolicy:
        needed = [tuple(needed) for needed in future]
        return POLICIES[name](PolicySetting(topology=TOPOLOGY, capacity=capacity, future=needed, load=LOAD, seed=3))

    return build


# each event is of one layer, as in a model
layer_events = st.tuples(st.sampled_from([0, 4]), st.sets(st.integers(0, 3), min_size=1)).map(
    lambda drawn: sorted(drawn[0] + expert for expert in drawn[1])
)
traces = st.lists(layer_events, min_size=1, max_size=12)


class Driven:
    """A policy that is used as a cache uses it; everything it says is checked against the plain set of residents."""

    def __init__(self, build: Build, trace: Sequence[Sequence[int]], capacity: int) -> None:
        self.policy, self.capacity = build(trace, capacity), capacity
        self.resident: set[int] = set()
        self.said: list[list[int]] = []

    def event(self, number: int, needed: Sequence[int], forecast: Forecast | None = None) -> None:
        self.policy.foresee(forecast, acting=True)
        self.policy.use(needed, number)
        self.resident |= set(needed)
        assert self.policy.tracked() == self.resident
        protected = frozenset(needed)
        self.said.append([])
        for ask in (
            self.policy.overdue,
            lambda protected: self.policy.victims(max(0, len(self.resident) - self.capacity), protected),
        ):
            victims = ask(protected)
            self.said[-1] += victims
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
        quarter = np.full(TOPOLOGY.num_experts, 0.25, np.float32)
        said = Forecast(number, quarter, quarter[::-1] if number % 2 else None)
        first.event(number, needed, said)
        second.event(number, needed, said)
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
    """Used in the same event and never again, experts of one value leave in ascending order."""
    policy = build([[4, 5, 6, 7]], 4)
    if isinstance(policy, Random | Static):
        return  # no two of these have the same value
    policy.use([4, 5, 6, 7], 1)
    assert policy.victims(4, frozenset()) == [4, 5, 6, 7]
    assert policy.victims(2, frozenset([4])) == [5, 6]


def begins_anew_where_told(build: Build, trace: list[list[int]]) -> None:
    """Another sequence changes what leaves, never who is tracked."""
    driven = Driven(build, trace, 3)
    for number, needed in enumerate(trace, start=1):
        driven.policy.restart()
        driven.event(number, needed)


CHECKS = [
    never_names_protected,
    names_distinct_tracked_experts,
    names_all_it_can,
    ranks_once_and_for_all,
    is_deterministic,
    forgets_removed,
    breaks_ties_by_the_smallest,
    begins_anew_where_told,
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("name", POLICIES)
@given(trace=traces)
@settings(max_examples=15, deadline=None)
def test_policy(name: PolicyName, check: Callable[[Build, list[list[int]]], None], trace: list[list[int]]) -> None:
    check(build_of(name), trace)


def test_every_policy_of_the_package_has_a_name() -> None:
    made = {type(build_of(name)([], 4)).__name__ for name in POLICIES}
    assert made == set(policies.__all__) - {"EvictionPolicy"}


def test_an_unknown_policy_is_refused_with_the_nearest_name() -> None:
    setting = PolicySetting(topology=TOPOLOGY, capacity=2)
    with pytest.raises(SettingError, match="did you mean 'belady'"):
        make_policy("beladi", setting)
    with pytest.raises(SettingError, match="got 'predicted', which evicts by a predictor's forecasts"):
        make_policy("predicted", setting)  # a trace holds no forecasts
    with pytest.raises(SettingError, match="'static' needs a load"):
        make_policy("static", setting)
