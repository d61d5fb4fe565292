"""The guard: what a predictor gains against what it costs, and a bad one suspended in a running engine."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import numpy as np
import pytest
from foregate.collect.topology import MoeTopology
from foregate.runtime.cache import ExpertCache
from foregate.runtime.clock import ManualClock
from foregate.runtime.engine import ExpertEngine
from foregate.runtime.forecast import Forecast
from foregate.runtime.guard import FIRST_PAUSE, WINDOW_EVENTS, Guard, Window
from foregate.runtime.policies import Lru
from foregate.runtime.prefetch import Prefetcher, Windows
from foregate.runtime.transfer import InlineTransfers
from foregate.runtime.transfer_queue import Transfer

GOOD = Window(shadow_misses=100, loaded=100, hidden=60, wasted=5, predictor_s=0.01, read_s=0.001)
BAD = Window(shadow_misses=100, loaded=105, hidden=5, wasted=60, predictor_s=0.01, read_s=0.001)


def test_worth_in_seconds() -> None:
    assert GOOD.worth_s == pytest.approx(0.045)
    assert BAD.worth_s == pytest.approx(-0.070)
    assert Window(90, 80, 0, 0, 0.004, 0.001).worth_s == pytest.approx(0.006)  # better eviction alone
    assert Window(90, 90, 0, 0, 0.004, 0.001).worth_s == pytest.approx(-0.004)  # its time for nothing


def test_a_window_is_the_difference_of_two_totals() -> None:
    assert Window(110, 105, 8, 7, 0.5, 0.002).since(Window(100, 100, 5, 4, 0.2, 0.009)) == pytest.approx(
        Window(10, 5, 3, 3, 0.3, 0.002)
    )


def test_a_good_predictor_stays() -> None:
    guard = Guard()
    assert all(guard.judge(GOOD) for _ in range(10))
    assert guard.reason.startswith("auto: acting, worth +45.0 ms in 256 events")


def test_a_bad_predictor_rests_twice_as_long_each_time() -> None:
    guard = Guard()
    rests = []
    for _ in range(3):
        assert not guard.judge(BAD)
        assert "suspended for" in guard.reason
        assert "100 LRU misses against 105 blocks loaded, 5 of them hidden, 60 wasted" in guard.reason
        rest = 1
        while not guard.judge(BAD):
            rest += 1
        rests.append(rest)
        assert guard.reason == "auto: trying the predictor again"
    assert rests == [FIRST_PAUSE, 2 * FIRST_PAUSE, 4 * FIRST_PAUSE]


def test_what_goes_by_while_it_rests_does_not_count() -> None:
    guard = Guard()
    guard.judge(BAD)
    assert not guard.judge(GOOD)
    assert guard.judge(GOOD)


TOPOLOGY = MoeTopology.uniform(4, 16, 2)
CAPACITY, PROBATION = 16, 4
READ_S, COMPUTE_S = 0.001, 0.004


class Ticking(ManualClock):
    """A clock that a transfer looks at twice between its start and its end."""

    def now(self) -> float:
        self.advance(READ_S / 2)
        return super().now()


class Link(InlineTransfers):
    """A link that moves the clock where somebody waits for it."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__(clock=Ticking())
        self.clock = clock

    def wait_any(self, transfers: Sequence[Transfer]) -> Transfer:
        self.clock.advance(READ_S)
        return super().wait_any(transfers)


def drive(say: str, windows: int, predictor_s: float = 0.0) -> ExpertEngine:
    """Run random routing through an engine whose predictor is right, wrong or silent."""
    clock, random = ManualClock(), Random(1)
    link = Link(clock)
    events = 0
    engine = ExpertEngine(
        TOPOLOGY,
        ExpertCache(CAPACITY, Lru(), probation=PROBATION),
        link,
        clock,
        prefetcher=Prefetcher(TOPOLOGY, Windows(TOPOLOGY.num_layers), limit=PROBATION),
        shadow=ExpertCache(CAPACITY, Lru()),
        predictor_s=lambda: events * predictor_s,
    )
    for step in range(windows * WINDOW_EVENTS // TOPOLOGY.num_layers):
        routing = [sorted(random.sample(range(16), 2)) for _ in range(TOPOLOGY.num_layers)]
        demand = np.zeros(TOPOLOGY.num_experts, np.float32)
        for layer, experts in enumerate(routing):
            named = experts if say == "right" else random.sample(sorted(set(range(16)) - set(experts)), 2)
            if say != "nothing":
                demand[[TOPOLOGY.flat(layer, expert) for expert in named]] = 1.0
        for layer, experts in enumerate(routing):
            needed = [TOPOLOGY.flat(layer, expert) for expert in experts]
            events += engine.acting
            with engine.acquire(layer, needed, one_token=True, forecast=Forecast(step, demand)) as served:
                list(served)
            clock.advance(COMPUTE_S)
            for transfer in link.pending[: int(COMPUTE_S / READ_S)]:
                link.finish(transfer)
        engine.check()
    return engine


def test_a_predictor_that_is_right_stays_and_hides_reads() -> None:
    engine = drive("right", windows=4)
    assert engine.acting
    assert engine.counters.on_time > 0.5 * engine.counters.misses
    assert engine.windows.read_s == pytest.approx(READ_S)
    assert engine.counters.wasted < 0.02 * engine.counters.prefetches


def test_a_predictor_that_is_wrong_is_suspended() -> None:
    engine = drive("wrong", windows=1)
    assert not engine.acting
    assert engine.guard is not None
    assert "suspended for 2 windows" in engine.guard.reason
    before = engine.counters.prefetches
    assert before > 0
    later = drive("wrong", windows=3)
    assert later.counters.prefetches == before, "nothing is prefetched while it rests"


def test_a_predictor_that_gains_nothing_is_suspended_for_its_time() -> None:
    assert not drive("nothing", windows=1, predictor_s=0.001).acting
    assert drive("nothing", windows=1, predictor_s=0.0).acting
