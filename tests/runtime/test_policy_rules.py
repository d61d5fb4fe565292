"""The rule of each eviction policy: by hand, and beside slow plain forms and a search through all choices."""

from __future__ import annotations

from functools import cache as memoised
from itertools import combinations

import numpy as np
from foregate.collect.topology import MoeTopology
from foregate.runtime.cache import ExpertCache
from foregate.runtime.policies import (
    Activation,
    Belady,
    EvictionPolicy,
    LayerLru,
    Lfru,
    Lfu,
    Lru,
    Random,
    S3Fifo,
    Static,
)
from foregate.runtime.replay import Event, replay
from hypothesis import given, settings
from hypothesis import strategies as st

TOPOLOGY = MoeTopology.uniform(2, 4, 2)  # flat indices 0..3 and 4..7
LOAD = np.array([5, 0, 2, 2, 9, 1, 0, 3])


def used(policy: EvictionPolicy, *events: list[int]) -> EvictionPolicy:
    for number, needed in enumerate(events, start=1):
        policy.use(needed, number)
    return policy


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
