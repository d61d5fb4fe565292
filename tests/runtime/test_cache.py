"""The expert cache beside a slow plain model of what its docstring says."""

from __future__ import annotations

import pytest
from foregate.collect.errors import SettingError
from foregate.collect.topology import MoeTopology
from foregate.runtime.cache import ExpertCache
from foregate.runtime.policies import LayerLru, Lru
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

EXPERTS = 9


def used(capacity: int, *events: list[int], probation: int = 0) -> ExpertCache:
    """Give a cache after events of one token."""
    cache = ExpertCache(capacity, Lru(), probation=probation)
    for needed in events:
        cache.event(needed, one_token=True)
    return cache


def test_the_example_of_the_docstring() -> None:
    cache = used(3, [1], [2], [3])
    assert cache.event([3, 9], one_token=True) == ([3], [], [9], [1])
    assert cache.resident == {2, 3, 9}


def test_an_event_of_several_tokens_may_push_out_its_own_experts() -> None:
    cache = used(2, [8], [9])
    assert cache.event([1, 8, 9], one_token=False) == ([8, 9], [], [1], [1])
    assert cache.event([2, 3, 4], one_token=False) == ([], [], [2, 3, 4], [8, 9, 2])
    assert cache.resident == {3, 4}


def test_an_event_of_one_token_keeps_its_own_experts() -> None:
    cache = used(3, [1, 2, 3])
    assert cache.event([4, 5], one_token=True).leaving == [1, 2]
    assert cache.resident == {3, 4, 5}


def test_a_token_that_needs_more_than_fits_is_served_like_several() -> None:
    cache = used(2)
    plan = cache.event([1, 2, 3], one_token=True)
    assert plan == ([], [], [1, 2, 3], [1])
    cache.check()


def test_a_policy_may_cut_its_parts_though_there_is_room() -> None:
    cache = ExpertCache(4, LayerLru(MoeTopology.uniform(2, 4, 2), 4))  # two experts for each layer
    assert cache.event([0, 1], one_token=True).leaving == []
    assert cache.event([2], one_token=True) == ([], [], [2], [0])
    assert cache.event([1, 2, 3], one_token=False) == ([1, 2], [], [3], [1])
    assert cache.event([4, 5], one_token=True).leaving == []
    assert cache.resident == {2, 3, 4, 5}
    cache.check()


def test_a_token_that_needs_more_than_its_layers_share_takes_room_of_others() -> None:
    cache = ExpertCache(3, LayerLru(MoeTopology.uniform(2, 4, 2), 3))  # two experts and one
    cache.event([0, 1], one_token=True)
    assert cache.event([4, 5], one_token=True).leaving == [0]
    assert cache.event([4], one_token=True).leaving == [5]
    assert cache.event([2, 3], one_token=True).leaving == [1]
    cache.check()


def test_wrong_guesses_leave_before_what_was_demanded() -> None:
    cache = used(4, [1], [2], probation=2)
    assert cache.admit(7, event=3, pinned=frozenset()) == []
    cache.land(7)
    assert cache.event([3], one_token=True).leaving == []  # event 3 went by without 7
    assert cache.event([4], one_token=True).leaving == [7]
    assert cache.resident == {1, 2, 3, 4}
    assert cache.wasted == 1


def test_a_guess_is_wrong_as_soon_as_its_event_has_been_served() -> None:
    cache = used(2, [1], [2], probation=1)
    assert cache.admit(7, event=3, pinned=frozenset([2])) == [1]
    cache.land(7)
    assert cache.event([3], one_token=True).leaving == [7]


def test_open_guesses_outlive_what_was_demanded_but_not_a_token_in_need() -> None:
    cache = used(3, [1], [2], probation=2)
    cache.admit(7, event=9, pinned=frozenset())
    cache.land(7)
    assert cache.event([3], one_token=True).leaving == [1]
    assert cache.event([4, 5], one_token=True).leaving == [2, 3]
    assert cache.resident == {4, 5, 7}
    assert cache.event([3, 4, 5], one_token=True).leaving == [7]


def test_probation_bounds_guesses() -> None:
    cache = used(6, [1], probation=2)
    assert cache.admit(7, event=5, pinned=frozenset()) == []
    assert cache.admit(8, event=6, pinned=frozenset()) == []
    assert cache.admit(6, event=7, pinned=frozenset()) is None
    cache.land(7)
    assert cache.admit(6, event=7, pinned=frozenset()) is None  # 7 may still be right
    for needed in ([1], [1], [1], [1]):
        cache.event(needed, one_token=True)
    assert cache.admit(6, event=7, pinned=frozenset()) == [7]  # now it was wrong
    assert cache.wasted == 1
    cache.check()


def test_what_is_there_or_on_its_way_is_not_admitted_again() -> None:
    cache = used(4, [1], probation=2)
    assert cache.admit(1, event=2, pinned=frozenset()) is None
    cache.admit(2, event=2, pinned=frozenset())
    assert cache.admit(2, event=2, pinned=frozenset()) is None


def test_a_guess_that_comes_true_is_demanded_from_then_on() -> None:
    cache = used(3, [1], probation=2)
    cache.admit(5, event=2, pinned=frozenset())
    cache.admit(6, event=2, pinned=frozenset())
    cache.land(5)
    assert cache.event([5, 6], one_token=True) == ([5], [6], [], [])
    assert not cache.unproven
    assert not cache.in_flight
    assert cache.event([7], one_token=True).leaving == [1]
    assert cache.wasted == 0


@pytest.mark.parametrize(
    ("capacity", "probation", "message"),
    [
        (0, 0, "capacity must be at least 1 expert, got 0"),
        (4, 4, r"probation must lie in 0\.\.3, got 4"),
        (4, -1, r"probation must lie in 0\.\.3, got -1"),
    ],
)
def test_impossible_sizes_are_refused(capacity: int, probation: int, message: str) -> None:
    with pytest.raises(SettingError, match=message):
        ExpertCache(capacity, Lru(), probation=probation)


class Plain:
    """The same rules on sorted lists."""

    def __init__(self, capacity: int, probation: int) -> None:
        self.capacity, self.probation = capacity, probation
        self.demanded: dict[int, int] = {}  # expert -> last event
        self.guesses: list[tuple[int, int]] = []  # landed and unused, oldest first: (expert, event)
        self.flying: dict[int, int] = {}
        self.clock = self.wasted = 0

    @property
    def resident(self) -> set[int]:
        return {*self.demanded, *(expert for expert, _ in self.guesses)}

    def ranked(self, protected: set[int]) -> list[int]:
        """List who leaves, first to last."""
        wrong = [expert for expert, event in self.guesses if event <= self.clock]
        still_open = [expert for expert, event in self.guesses if event > self.clock]
        old = sorted(self.demanded, key=lambda expert: (self.demanded[expert], expert))
        return [expert for expert in [*wrong, *old, *still_open] if expert not in protected]

    def drop(self, experts: list[int]) -> list[int]:
        self.wasted += sum(expert in experts for expert, _ in self.guesses)
        self.guesses = [(expert, event) for expert, event in self.guesses if expert not in experts]
        for expert in experts:
            self.demanded.pop(expert, None)
        return experts

    def event(self, needed: list[int], one_token: bool) -> tuple[list[int], list[int], list[int], list[int]]:
        self.clock += 1
        hits = [expert for expert in needed if expert in self.resident]
        delayed = [expert for expert in needed if expert in self.flying]
        misses = [expert for expert in needed if expert not in hits and expert not in delayed]
        self.guesses = [(expert, event) for expert, event in self.guesses if expert not in needed]
        self.flying = {expert: event for expert, event in self.flying.items() if expert not in needed}
        self.demanded.update(dict.fromkeys(needed, self.clock))
        excess = max(0, len(self.resident) + len(self.flying) - self.capacity)
        fits = len(needed) + len(self.flying) <= self.capacity
        leaving = self.ranked(set(needed) if one_token and fits else set())[:excess]
        return hits, delayed, misses, self.drop(leaving)

    def admit(self, expert: int, event: int, pinned: set[int]) -> list[int] | None:
        if expert in self.resident or expert in self.flying or not self.probation:
            return None
        leaving: list[int] = []
        if len(self.guesses) + len(self.flying) >= self.probation:
            leaving = [e for e, meant in self.guesses if meant <= self.clock][:1]
            if not leaving:
                return None
        elif len(self.resident) + len(self.flying) >= self.capacity:
            leaving = self.ranked(pinned)[:1]
            if not leaving:
                return None
        self.flying[expert] = event
        return self.drop(leaving)


class Beside(RuleBasedStateMachine):
    """Drive both with the same random operations."""

    def __init__(self) -> None:
        super().__init__()
        self.last: list[int] = []

    @initialize(capacity=st.integers(1, 6), share=st.sampled_from([0.0, 0.3, 0.6, 1.0]))
    def build(self, capacity: int, share: float) -> None:
        probation = int(share * (capacity - 1))
        self.cache = ExpertCache(capacity, Lru(), probation=probation)
        self.plain = Plain(capacity, probation)

    @rule(needed=st.sets(st.integers(0, EXPERTS - 1), min_size=1, max_size=7), one_token=st.booleans())
    def event(self, needed: set[int], one_token: bool) -> None:
        self.last = sorted(needed)
        assert self.cache.event(self.last, one_token=one_token) == self.plain.event(self.last, one_token)

    @rule(expert=st.integers(0, EXPERTS - 1), ahead=st.integers(1, 4), pin=st.booleans())
    def admit(self, expert: int, ahead: int, pin: bool) -> None:
        pinned = frozenset(self.last if pin else ())
        event = self.cache.clock + ahead
        assert self.cache.admit(expert, event, pinned) == self.plain.admit(expert, event, set(pinned))

    @rule(data=st.data(), lands=st.booleans())
    @precondition(lambda self: self.cache.in_flight)
    def end(self, data: st.DataObject, lands: bool) -> None:
        expert = data.draw(st.sampled_from(sorted(self.cache.in_flight)))
        event = self.plain.flying.pop(expert)
        if lands:
            self.cache.land(expert)
            self.plain.guesses.append((expert, event))
        else:
            self.cache.abandon(expert)

    @rule(data=st.data())
    @precondition(lambda self: self.cache.resident)
    def forget(self, data: st.DataObject) -> None:
        expert = data.draw(st.sampled_from(sorted(self.cache.resident)))
        self.cache.forget(expert)
        self.plain.drop([expert])

    @invariant()
    def agree(self) -> None:
        self.cache.check()
        assert self.cache.resident == self.plain.resident
        assert self.cache.in_flight == self.plain.flying
        assert list(self.cache.unproven.items()) == self.plain.guesses
        assert self.cache.wasted == self.plain.wasted


TestBeside = Beside.TestCase
TestBeside.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
