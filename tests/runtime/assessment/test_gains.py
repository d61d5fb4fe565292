"""Gains and the verdict: pure functions of numbers, on cases made by hand."""

from __future__ import annotations

import pytest
from foregate.runtime.assessment.gains import (
    Coverage,
    Misses,
    gains_of,
    largest_gains,
    signal_s,
    token_times,
)
from foregate.runtime.assessment.verdict import (
    EVICTION_SHARE,
    PREFETCH_SHARE,
    WORTH_GAIN,
    Findings,
    attainable,
    judge,
    worth_between,
)

HALF = Coverage((1.0, 2.0), (0.5, 0.8))  # covers half of the misses with as many fetches
NONE = Coverage((), ())


def findings(misses: Misses, compute_s: float, read_s: float, coverage: Coverage = HALF, **values: object) -> Findings:
    given: dict = {
        "capacity": 64,
        "num_experts": 256,
        "misses": misses,
        "fits": False,
        "signal": "token_table",
        "coverage": coverage,
        "recall": 0.5,
        "known": 0.25,
        "times": token_times(misses, compute_s, read_s, coverage),
        "machine": "a machine",
    }
    return Findings(**(given | values))


def test_times_by_hand() -> None:
    times = token_times(Misses(lru=10, free=8, belady=5), compute_s=4.0, read_s=1.0, coverage=HALF)
    assert (times.resident, times.lru, times.belady, times.free) == (4.0, 14.0, 9.0, 12.0)
    assert (times.lru_prefetched, times.limit, times.free_prefetched) == (10.0, 5.0, 8.0)
    # 4 s of idle link are room for 4 fetches, half a fetch per miss of 8, which cover a quarter of them: 2 s
    assert times.free_signal == pytest.approx(10.0)
    gains = gains_of(times)
    assert (gains.prefetch, gains.cache, gains.both) == pytest.approx((1.4, 14 / 9, 2.8))
    assert times.to_json()["limit"] == 0.2


@pytest.mark.parametrize("ratio", [0.01, 0.3, 0.5, 1.0, 2.0, 50.0])
def test_no_machine_gains_more_than_the_largest(ratio: float) -> None:
    misses = Misses(lru=10, free=9, belady=4)
    most, here = largest_gains(misses), gains_of(token_times(misses, 1.0, ratio / 10, NONE))
    assert (most.prefetch, most.cache, most.both) == (2.0, 2.5, 3.5)
    assert here.prefetch <= most.prefetch
    assert here.cache <= most.cache
    assert here.both <= most.both


def test_the_largest_gains_are_reached() -> None:
    misses = Misses(lru=10, free=9, belady=4)
    assert gains_of(token_times(misses, 10.0, 1.0, NONE)).prefetch == 2.0
    assert gains_of(token_times(misses, 4.0, 1.0, NONE)).both == 3.5
    assert gains_of(token_times(misses, 1e-9, 1.0, NONE)).cache == pytest.approx(2.5)


def test_a_signal_hides_no_more_than_the_link_has_idle_and_no_foresight_is_beaten() -> None:
    perfect = Coverage((1.0,), (1.0,))
    assert signal_s(14.0, 10, 4.0, 1.0, perfect) == 10.0
    assert signal_s(14.0, 10, 4.0, 1.0, NONE) == 14.0
    assert signal_s(4.0, 0, 4.0, 1.0, perfect) == 4.0
    assert signal_s(10.0, 10, 4.0, 1.0, perfect) == 10.0  # the link never idles


def test_everything_fits() -> None:
    verdict = judge(findings(Misses(0.1, 0.1, 0.1), 1.0, 1.0, fits=True, capacity=256))
    assert (verdict.kind, verdict.training) == ("fits", False)
    assert (verdict.gains.prefetch, verdict.gains.cache, verdict.gains.both) == (1.0, 1.0, 1.0)
    assert "everything fits" in verdict.sentence
    small = judge(findings(Misses(0.1, 0.1, 0.1), 1.0, 1.0, fits=True))
    assert "all experts that the trace uses fit" in small.sentence


def test_a_tiny_working_set_needs_only_a_cache() -> None:
    verdict = judge(findings(Misses(lru=0.02, free=0.02, belady=0.015), 1.0, 1.0))
    assert (verdict.kind, verdict.training) == ("free_suffices", False)
    assert verdict.gains.both == pytest.approx(1.02)
    assert "not worth it" in verdict.sentence
    assert "faster than LRU with the free signal token table" in verdict.sentence


def test_a_trace_that_lacks_most_choices_gets_no_verdict() -> None:
    verdict = judge(findings(Misses(lru=10, free=8, belady=5), 4.0, 1.0, absent=0.8))
    assert (verdict.kind, verdict.training) == ("incomplete", None)
    assert "cannot be said: 80% of the choices are absent" in verdict.sentence
    assert judge(findings(Misses(lru=10, free=8, belady=5), 4.0, 1.0, absent=0.05)).kind != "incomplete"


def test_a_saturated_link_wants_slots_and_not_training() -> None:
    verdict = judge(findings(Misses(lru=40, free=40, belady=26), compute_s=0.03, read_s=0.014))
    assert (verdict.kind, verdict.training) == ("saturated", False)
    assert verdict.gains.prefetch == pytest.approx(0.59 / 0.56)
    assert "only more slots, smaller experts or a faster link" in verdict.sentence


def test_routing_that_nothing_foretells_is_not_worth_training_on_any_machine() -> None:
    for times in ({}, {"times": None}):
        verdict = judge(findings(Misses(10, 10, 4), 4.0, 1.0, NONE, recall=0.27, known=0.25, **times))
        assert (verdict.kind, verdict.training) == ("unpredictable", False)
        assert "27%" in verdict.sentence
        assert "25%" in verdict.sentence


def test_an_idle_link_and_predictable_routing_are_worth_training() -> None:
    found = findings(Misses(lru=10, free=9, belady=4), compute_s=9.0, read_s=1.0)
    verdict = judge(found)
    assert (verdict.kind, verdict.training) == ("train", True)
    assert found.times is not None
    free = found.times.free_signal
    expected = free - PREFETCH_SHARE * (free - found.times.free_prefetched)
    expected -= EVICTION_SHARE * (free - found.times.belady_signal)
    assert verdict.attainable == pytest.approx(free / expected)
    assert verdict.attainable >= WORTH_GAIN
    assert verdict.sentence.startswith("With 64 of 256 experts (25%) in slots on a machine, LRU on demand makes")
    assert "Training is worth it here" in verdict.sentence
    assert "routing head" in verdict.sentence


def test_where_only_evictions_help_the_reuse_head_is_named() -> None:
    verdict = judge(findings(Misses(lru=10, free=10, belady=2), compute_s=0.1, read_s=1.0))
    assert verdict.kind == "train"
    assert "reuse head" in verdict.sentence
    assert "only more slots or smaller experts would help" in verdict.sentence


def test_without_a_machine_the_bounds_hold_for_any_and_training_depends_on_it() -> None:
    verdict = judge(findings(Misses(10, 9, 4), 1.0, 1.0, times=None))
    assert (verdict.kind, verdict.training) == ("depends", None)
    assert (verdict.room, verdict.attainable) == (None, None)
    assert "prefetching can gain at most 2.00 x, a better cache at most 2.50 x, both at most 3.50 x" in verdict.sentence
    assert "--hardware" in verdict.sentence
    assert verdict.worth_between is not None
    low, high = verdict.worth_between
    assert attainable(token_times(Misses(10, 9, 4), 1.0, low / 10, HALF)) >= WORTH_GAIN
    assert attainable(token_times(Misses(10, 9, 4), 1.0, 0.9 * low / 10, HALF)) < WORTH_GAIN
    assert low < 1 < high


def test_no_machine_is_worth_it_where_the_free_way_is_the_optimum() -> None:
    perfect = Coverage((1.0,), (1.0,))
    assert worth_between(Misses(5, 5, 5), perfect) is None
    verdict = judge(findings(Misses(5, 5, 5), 1.0, 1.0, perfect, times=None))
    assert (verdict.kind, verdict.training) == ("free_suffices", False)
    assert "on no machine" in verdict.sentence


@pytest.mark.parametrize("misses", [Misses(10, 9, 4), Misses(1, 1, 1), Misses(0, 0, 0)])
@pytest.mark.parametrize("read_s", [0.0, 1e-6, 1.0, 1e6])
def test_a_trained_predictor_never_beats_the_limit_or_loses(misses: Misses, read_s: float) -> None:
    times = token_times(misses, 1.0, read_s, HALF)
    assert 1.0 <= attainable(times) <= times.free_signal / times.limit + 1e-12
