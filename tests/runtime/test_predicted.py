"""The policy `predicted`: its rule by hand and beside a slow plain form, late forecasts, the optimum's own scores."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from foregate.collect.topology import MoeLayer, MoeTopology
from foregate.runtime.cache import ExpertCache
from foregate.runtime.forecast import Forecast
from foregate.runtime.policies import Belady, EvictionPolicy, Lru, Predicted
from foregate.runtime.policies.predicted import DECAY, SURPRISE
from hypothesis import given, settings
from hypothesis import strategies as st

TOPOLOGY = MoeTopology.uniform(2, 4, 2)  # flat indices 0..3 and 4..7
UNEVEN = MoeTopology(
    layers=tuple(MoeLayer(stack="causal", block=i, num_experts=n, top_k=2) for i, n in enumerate((3, 5, 2)))
)
FAR = 1 << 22  # an event number beyond every drawn trace, exact in float32
ALL = frozenset[int]()


def values(*given: float) -> np.ndarray:
    return np.array(given, np.float32)


def entered(**parts: float) -> Predicted:
    """Give a policy that holds all eight experts."""
    policy = Predicted(TOPOLOGY, **parts)
    policy.use([0, 1, 2, 3], 1)
    policy.use([4, 5, 6, 7], 2)
    return policy


def test_demand_counts_for_layers_ahead_only() -> None:
    policy = entered()
    policy.foresee(Forecast(1, values(0.9, 0, 0, 0, 0, 0.8, 0.1, 0.7)), acting=True)
    policy.use([0, 1], 3)  # layer 0: what is ahead is layer 1
    assert policy.victims(8, ALL) == [2, 3, 4, 0, 1, 6, 7, 5]
    policy.use([4], 4)  # layer 1: nothing is ahead any more
    assert policy.victims(3, ALL) == [2, 3, 5]


def test_reuse_counts_for_every_layer_and_takes_the_place_of_recent_use() -> None:
    policy = entered(surprise=0)
    demand, reuse = values(9, 0, 0, 0, 0.5, 0, 0, 0), values(0.4, 0.1, 0.3, 0.1, 0.1, 0.2, 0.5, 0.3)
    policy.foresee(Forecast(1, demand, reuse), acting=True)
    policy.use([0, 2], 3)
    # layer 0 has run: .4 .1 .3 .1; layer 1 has not: .6 .2 .5 .3
    assert policy.victims(8, ALL) == [1, 3, 5, 2, 7, 0, 6, 4]
    policy.use([5, 6], 4)
    assert policy.victims(8, ALL) == [1, 3, 4, 5, 2, 7, 0, 6]


def test_a_layer_that_has_run_is_corrected_by_what_it_used() -> None:
    policy = entered(surprise=0.5)
    demand, reuse = values(0.8, 0.2, 0.6, 0, 0.4, 0, 0, 0.2), values(0.3, 0.3, 0.3, 0.3, 0.3, 0.3, 0.3, 0.3)
    policy.foresee(Forecast(1, demand, reuse), acting=True)
    policy.use([1, 2], 3)
    # layer 0: .3 - .4, .3 + .5 - .1, .3 + .5 - .3, .3; layer 1: .7 .3 .3 .5
    assert policy.victims(8, ALL) == [0, 3, 5, 6, 2, 7, 1, 4]
    policy.use([6], 4)
    assert policy.victims(8, ALL)[:4] == [0, 4, 7, 3]  # layer 1: .1 .3 .8 .2
    policy.foresee(None, acting=True)  # what was learned of the last step stays known in the next
    assert policy.victims(8, ALL)[:4] == [0, 4, 7, 3]


def test_a_forecast_that_comes_in_mid_step_finds_the_layers_before_it_run() -> None:
    late, early = entered(surprise=0), entered(surprise=0)
    said = Forecast(1, values(1, 1, 1, 1, 1, 1, 1, 1), values(0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1))
    early.foresee(said, acting=True)
    for policy in (late, early):
        policy.use([0], 3)
        policy.foresee(said, acting=True)
        policy.use([4], 4)
    assert late.victims(8, ALL) == early.victims(8, ALL) == [7, 6, 5, 4, 3, 2, 1, 0]


def test_without_a_forecast_the_last_reuse_holds_and_the_last_demand_does_not() -> None:
    policy = entered(surprise=0)
    reuse = values(0.4, 0.1, 0.3, 0.2, 0.45, 0.15, 0.35, 0.25)
    policy.foresee(Forecast(1, values(0, 9, 9, 9, 0, 9, 9, 9), reuse), acting=True)
    policy.use([0], 3)
    policy.use([4], 4)
    policy.foresee(None, acting=True)  # another step, whose forecast is late
    assert policy.victims(8, ALL) == [1, 5, 3, 7, 2, 6, 0, 4]
    policy.use([1], 5)  # layer 0 runs: .38 .145 .285 .19, layer 1 stays as it was said
    assert policy.victims(8, ALL) == [1, 5, 3, 7, 2, 6, 0, 4]
    for number in range(6, 60):  # as forecasts stay away, recent use decides
        policy.foresee(None, acting=True)
        policy.use([1] if number % 2 else [5], number)
    assert policy.victims(8, ALL)[-2:] == [1, 5]
    assert reuse.tolist() == values(0.4, 0.1, 0.3, 0.2, 0.45, 0.15, 0.35, 0.25).tolist(), "a forecast is not changed"


def test_it_is_lru_where_forecasts_are_not_acted_on() -> None:
    predicted, lru = Predicted(TOPOLOGY), Lru()
    for number, needed in enumerate(([1, 3], [4, 6], [0, 3], [5, 6], [1])):
        predicted.foresee(Forecast(number, np.ones(8, np.float32), values(*range(8))), acting=False)
        for policy in (predicted, lru):
            policy.use(needed, number)
        assert predicted.victims(9, frozenset([4])) == lru.victims(9, frozenset([4]))


def test_scores_below_zero_rank_too() -> None:
    policy = entered(surprise=0)
    policy.foresee(Forecast(1, np.zeros(8, np.float32), -values(3, 1, 2, 4, 8, 5, 7, 6)), acting=True)
    policy.use([4], 3)
    assert policy.victims(8, frozenset([6])) == [4, 7, 5, 3, 0, 2, 1]


class Plain(EvictionPolicy):
    """The rule as it is written in its description, evaluated anew for every question."""

    def __init__(self, topology: MoeTopology) -> None:
        self.layer_of = [topology.ids[expert].layer for expert in range(topology.num_experts)]
        self.held: set[int] = set()
        self.reuse = [np.float32(0)] * topology.num_experts
        self.said: Forecast | None = None
        self.farthest = -1  # layer that has run since the forecast came

    def foresee(self, forecast: Forecast | None, *, acting: bool) -> None:
        if forecast is not self.said:
            self.farthest, self.said = -1, forecast
            if forecast is not None and forecast.reuse is not None:
                self.reuse = list(forecast.reuse - np.float32(SURPRISE) * forecast.demand)

    def use(self, needed: Sequence[int], event: int) -> None:
        self.held |= set(needed)
        layer = self.layer_of[needed[0]]
        averaging = self.said is None or self.said.reuse is None
        for expert, of in enumerate(self.layer_of):
            if of == layer and averaging:
                self.reuse[expert] *= np.float32(DECAY)
            if expert in needed:
                self.reuse[expert] += np.float32(1 - DECAY if averaging else SURPRISE)
        self.farthest = max(self.farthest, layer)

    def value(self, expert: int) -> np.float32:
        if self.said is None or self.layer_of[expert] <= self.farthest:
            return self.reuse[expert]
        return self.said.demand[expert] + (self.reuse if self.said.reuse is None else self.said.reuse)[expert]

    def victims(self, count: int, protected: frozenset[int]) -> list[int]:  # type: ignore[override]
        return sorted(self.held - protected, key=lambda expert: (self.value(expert), expert))[:count]

    def remove(self, expert: int) -> None:
        self.held.discard(expert)

    def tracked(self) -> set[int]:
        return self.held


def drawn_forecast(random: np.random.Generator, step: int, topology: MoeTopology) -> Forecast | None:
    """Draw a forecast of few distinct values, so that there are ties, without reuse or none at all now and then."""
    kind = random.random()
    if kind < 0.3:
        return None
    demand, reuse = (random.integers(0, 4, topology.num_experts).astype(np.float32) / 8 for _ in range(2))
    return Forecast(step, demand, reuse if kind < 0.8 else None)


@given(seed=st.integers(0, 1 << 16), capacity=st.integers(1, 9), steps=st.integers(1, 12))
@settings(max_examples=100, deadline=None)
def test_it_does_what_its_rule_says(seed: int, capacity: int, steps: int) -> None:
    random = np.random.default_rng(seed)
    quick, plain = Predicted(UNEVEN), Plain(UNEVEN)
    caches = [ExpertCache(capacity, policy) for policy in (quick, plain)]
    for step in range(steps):
        said = drawn_forecast(random, step, UNEVEN)
        arrives = random.integers(0, 2) * random.integers(0, 3)  # mostly in time
        for layer, spec in enumerate(UNEVEN.layers):
            if random.random() < 0.1:
                continue  # a layer that every token was dropped by
            count, one_token = random.integers(1, spec.num_experts + 1), bool(random.integers(0, 2))
            needed = sorted((UNEVEN.offsets[layer] + random.permutation(spec.num_experts)[:count]).tolist())
            for cache in caches:
                cache.policy.foresee(said if layer >= arrives else None, acting=True)
            plans = [cache.event(needed, one_token=one_token) for cache in caches]
            assert plans[0] == plans[1]
            assert quick.victims(99, ALL) == plain.victims(99, ALL)
            caches[0].check()


@given(seed=st.integers(0, 1 << 16), capacity=st.integers(2, 9))
@settings(max_examples=60, deadline=None)
def test_with_minus_the_next_event_for_a_score_it_is_the_optimum(seed: int, capacity: int) -> None:
    """What is used again last leaves first: reuse from the next token on, demand what this token's use adds to it."""
    random = np.random.default_rng(seed)
    tokens, layers = 15, UNEVEN.num_layers
    events = [
        sorted((low + random.permutation(spec.num_experts)[: spec.top_k]).tolist())
        for _ in range(tokens)
        for low, spec in zip(UNEVEN.offsets, UNEVEN.layers, strict=False)
    ]

    def next_event(expert: int, first: int) -> int:
        return next((number for number in range(first, len(events)) if expert in events[number]), FAR)

    belady = ExpertCache(capacity, Belady(events))
    predicted = ExpertCache(capacity, Predicted(UNEVEN, surprise=0))  # a use is no news
    for token in range(tokens):
        experts = range(UNEVEN.num_experts)
        after = values(*(-next_event(expert, (token + 1) * layers) for expert in experts))
        now = values(*(-next_event(expert, token * layers) for expert in experts))
        said = Forecast(token, now - after, after)
        for event in events[token * layers : (token + 1) * layers]:
            predicted.policy.foresee(said, acting=True)
            assert predicted.event(event, one_token=True) == belady.event(event, one_token=True)


@pytest.mark.parametrize("count", [0, 1, 6, 7, 20])
def test_few_and_many_victims_are_the_same_ranking(count: int) -> None:
    policy = entered(surprise=0)
    policy.foresee(Forecast(1, np.zeros(8, np.float32), values(3, 1, 2, 3, 1, 1, 0, 3)), acting=True)
    policy.use([7], 3)
    assert policy.victims(count, ALL) == [6, 1, 4, 5, 2, 0, 3, 7][:count]
