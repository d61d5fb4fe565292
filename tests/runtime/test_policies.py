"""One contract over every eviction policy, and Belady beside a search through all choices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache as memoised
from itertools import combinations

import numpy as np
import pytest
from foregate.collect.errors import SettingError
from foregate.collect.topology import MoeTopology
from foregate.runtime import policies
from foregate.runtime.cache import ExpertCache
from foregate.runtime.policies import (
    Activation,
    Belady,
    EvictionPolicy,
    LayerLru,
    Lfru,
    Lfu,
    Lru,
    Predicted,
    Random,
    S3Fifo,
    Static,
)
from foregate.runtime.policies.registry import POLICIES, PolicyName, PolicySetting, make_policy
from foregate.runtime.replay import Event, replay
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

    def event(self, number: int, needed: Sequence[int], demand: np.ndarray | None = None) -> None:
        self.policy.foresee(demand, acting=True)
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


def used(policy: EvictionPolicy, *events: list[int]) -> EvictionPolicy:
    for number, needed in enumerate(events, start=1):
        policy.use(needed, number)
    return policy


def test_every_policy_of_the_package_has_a_name() -> None:
    made = {type(build_of(name)([], 4)).__name__ for name in POLICIES}
    assert made == set(policies.__all__) - {"EvictionPolicy"}


def test_an_unknown_policy_is_refused_with_the_nearest_name() -> None:
    setting = PolicySetting(topology=TOPOLOGY, capacity=2)
    with pytest.raises(SettingError, match="did you mean 'belady'"):
        make_policy("beladi", setting)
    with pytest.raises(SettingError, match="no policy 'predicted' to replay"):
        make_policy("predicted", setting)  # a trace holds no forecasts
    with pytest.raises(SettingError, match="'static' needs a load"):
        make_policy("static", setting)


def test_lfu_counts_uses_since_an_expert_entered() -> None:
    policy = used(Lfu(), [2], [2, 5], [7], [5])
    assert policy.victims(3, frozenset()) == [7, 2, 5]  # 2 and 5 were used twice, 2 longer ago
    policy.remove(2)
    policy.use([2], 5)
    assert policy.victims(3, frozenset()) == [7, 2, 5]  # once, as 7, and later


def test_lfru_divides_uses_by_age() -> None:
    policy = used(Lfru(TOPOLOGY), [0], [0, 1], [0], [2], [3], [4])
    # 3 uses in 6 events; 1 in 5; 1 in 3; 1 in 2; 1 in 1
    assert policy.victims(5, frozenset()) == [1, 2, 0, 3, 4]
    policy.remove(0)
    policy.use([0], 7)
    assert policy.victims(5, frozenset()) == [1, 2, 3, 4, 0]  # it begins anew


def test_static_lets_the_rest_pass_beside_the_hot() -> None:
    # capacity 4 less one token's two experts: 4 (9 uses) and 0 (5 uses) are hot
    policy = used(Static(LOAD, TOPOLOGY, 4), [4], [0], [7], [1, 2], [7])
    assert policy.victims(5, frozenset()) == [1, 2, 7, 0, 4]


def test_static_has_no_hot_experts_without_load_or_room() -> None:
    policy = used(Static(LOAD, TOPOLOGY, 8), [6], [5], [1])  # six would be hot, and six have a load: 1 and 6 have none
    assert policy.victims(3, frozenset()) == [6, 1, 5]
    assert used(Static(LOAD, TOPOLOGY, 2), [4], [0], [4]).victims(2, frozenset()) == [0, 4]


def test_layer_lru_cuts_a_layer_though_others_have_room() -> None:
    policy = LayerLru(TOPOLOGY, 5)
    assert policy.shares == [3, 2]
    used(policy, [4, 5], [6])
    assert policy.overdue(frozenset([6])) == [4]
    policy.remove(4)
    assert policy.overdue(frozenset([6])) == []
    policy.use([0], 3)
    assert policy.overdue(frozenset()) == []


def test_layer_lru_names_those_beyond_their_share_first() -> None:
    policy = used(LayerLru(TOPOLOGY, 2), [0], [4, 5])  # a share of one expert each, and a token that needs two
    assert policy.overdue(frozenset([4, 5])) == []
    assert policy.victims(1, frozenset([4, 5])) == [0]
    assert policy.victims(3, frozenset()) == [4, 0, 5]


def test_activation_prefers_the_running_request_and_early_layers() -> None:
    policy = used(Activation(TOPOLOGY), [0, 1], [4, 5], [0, 2], [4, 6])
    # layer 0 (weight 1): 0 half, 1 and 2 a quarter; layer 1 (weight 1/2): 4 just under a quarter, 5 and 6 an eighth
    assert policy.victims(6, frozenset()) == [5, 6, 4, 1, 2, 0]
    policy.restart()
    policy.use([0, 3], 5)
    # this request used 0 and 3; 4, 5 and 6 are unknown (1/8 each), 1 and 2 all but unused
    assert policy.victims(7, frozenset()) == [1, 2, 4, 5, 6, 0, 3]


def test_random_spreads_evenly_and_repeats_with_its_seed() -> None:
    def victims(seed: int) -> list[int]:
        policy = Random(TOPOLOGY, seed)
        found = []
        for number in range(4000):
            policy.use(list(range(8)), number)
            found += policy.victims(1, frozenset([7]))
        return found

    first = victims(0)
    assert first == victims(0) != victims(1)
    counts = np.bincount(first, minlength=8)
    assert counts[7] == 0
    assert np.abs(counts[:7] - 4000 / 7).max() < 120  # five standard deviations


class PlainS3Fifo:
    """S3-FIFO written down as one loop over lists, as long as something has to leave."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.small_size = capacity, max(1, int(0.1 * capacity))
        self.ghosts = max(1, capacity - self.small_size)
        self.small, self.main, self.ghost = [], [], []
        self.uses: dict[int, int] = {}

    def event(self, event: Event) -> int:
        misses = 0
        for expert in event.needed:
            if expert in self.small + self.main:
                self.uses[expert] = min(3, self.uses[expert] + 1)
                continue
            misses, self.uses[expert] = misses + 1, 0
            if expert in self.ghost:
                self.ghost.remove(expert)
                self.main.append(expert)
            else:
                self.small.append(expert)
        safe = event.needed if event.one_token and len(event.needed) <= self.capacity else ()
        while len(self.small) + len(self.main) > self.capacity:
            small = [expert for expert in self.small if expert not in safe]
            main = [expert for expert in self.main if expert not in safe]
            if small and (len(self.small) >= self.small_size or not main):
                self.small.remove(small[0])
                if self.uses[small[0]] > 1:
                    self.uses[small[0]] = 0
                    self.main.append(small[0])
                else:
                    self.ghost = [*self.ghost, small[0]][-self.ghosts :]
            else:
                self.main.remove(main[0])
                if self.uses[main[0]] > 0:
                    self.uses[main[0]] -= 1
                    self.main.append(main[0])
        return misses


some_events = st.lists(
    st.builds(
        lambda needed, one_token: Event(tuple(sorted(needed)), one_token),
        st.sets(st.integers(0, 9), min_size=1, max_size=4),
        st.booleans(),
    ),
    max_size=60,
)


@given(events=some_events, capacity=st.integers(1, 8))
@settings(max_examples=100, deadline=None)
def test_s3fifo_does_what_three_plain_lists_do(events: list[Event], capacity: int) -> None:
    plain = PlainS3Fifo(capacity)
    cache = ExpertCache(capacity, S3Fifo(capacity))
    for event in events:
        assert len(cache.event(event.needed, one_token=event.one_token).misses) == plain.event(event)
        cache.check()
        assert cache.resident == {*plain.small, *plain.main}


@given(events=some_events, capacity=st.integers(1, 8))
@settings(max_examples=100, deadline=None)
def test_belady_follows_its_rule_written_down_plainly(events: list[Event], capacity: int) -> None:
    resident: set[int] = set()
    misses = 0
    for index, event in enumerate(events):
        misses += len(set(event.needed) - resident)
        resident |= set(event.needed)
        safe = set(event.needed) if event.one_token and len(event.needed) <= capacity else set()

        def next_event(expert: int, index: int = index) -> int:
            later = (n for n in range(index + 1, len(events)) if expert in events[n].needed)
            return next(later, len(events))

        while len(resident) > capacity:
            resident.remove(max(resident - safe, key=lambda expert: (next_event(expert), -expert)))
    assert replay(events, capacity, Belady([event.needed for event in events])).misses == misses


def fewest_misses(events: list[Event], capacity: int) -> int:
    """Search all choices of who leaves, event by event."""

    @memoised
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
