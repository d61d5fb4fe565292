"""Recall, its interval, calibration, and the published figures of the free baselines."""

from __future__ import annotations

import numpy as np
import pytest
from foregate.collect.errors import DataError
from foregate.collect.trace import Trace
from foregate.predictors.base import PredictorSpec
from foregate.predictors.baselines import BASELINES
from foregate.predictors.calibration import CalibrationCurve
from foregate.predictors.metrics import RecallMeter, ranks
from foregate.predictors.rows import group_of, join_parts
from foregate.predictors.scoring import measure, own_k
from hypothesis import given, settings
from hypothesis import strategies as st


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 10**6), st.integers(2, 6), st.integers(1, 3))
def test_ranks_are_places_in_a_stable_sort(seed, num_experts, top_k):
    rng = np.random.default_rng(seed)
    scores = rng.integers(0, 3, (4, 2, num_experts)).astype(np.float32)  # many ties
    experts = np.argsort(rng.random((4, 2, num_experts)), axis=-1)[..., : min(top_k, num_experts)].astype(np.int16)
    experts[0, 0, 0] = -1
    order = np.argsort(-scores, axis=-1, kind="stable")
    for index, rank in np.ndenumerate(ranks(scores, experts)):
        expert = experts[index]
        assert rank == (-1 if expert < 0 else order[index[:2]].tolist().index(expert))


def test_recall_by_hand():
    meter = RecallMeter(4)
    scores = np.array([[[9, 0, 0, 0]], [[4, 3, 2, 1]], [[4, 3, 2, 1]]], dtype=np.float32)
    meter.add(scores, np.array([[[3, 2]], [[0, 2]], [[1, -1]]], dtype=np.int16))  # the first token does not count
    assert meter.recall(1) == pytest.approx(1 / 3)
    assert meter.recall(2) == pytest.approx(2 / 3)
    assert meter.recall(3) == meter.recall([3]) == 1
    np.testing.assert_allclose(meter.per_layer(2), [2 / 3])


def test_interval_covers_sequences_not_tokens():
    meter = RecallMeter(2)
    for hit in [1, 0] * 20:
        scores = np.zeros((50, 1, 2), dtype=np.float32)
        scores[..., 0] = 1
        meter.add(scores, np.full((50, 1, 1), 1 - hit, dtype=np.int16))
    low, high = meter.interval(1)
    assert low < meter.recall(1) == 0.5 < high
    assert high - low == pytest.approx(4 * 0.5 / np.sqrt(40), rel=0.2)  # two standard errors of 40 sequences each way
    assert meter.interval(1) == meter.interval(1)


def test_recall_of_nothing_is_refused():
    with pytest.raises(DataError, match="at least one sequence"):
        RecallMeter(2).recall(1)


def test_calibration_of_honest_and_of_boastful_probabilities():
    rng = np.random.default_rng(0)
    probabilities = rng.random(20_000)
    used = (rng.random(20_000) < probabilities).astype(np.float32)
    honest, boastful = CalibrationCurve(), CalibrationCurve()
    honest.add(probabilities, used)
    boastful.add(np.minimum(1, probabilities + 0.2), used)
    assert honest.error() < 0.02 < 0.1 < boastful.error()
    curve = honest.to_json()
    assert sum(curve["predictions"]) == 20_000
    np.testing.assert_allclose(curve["predicted"], curve["observed"], atol=0.06)
    assert CalibrationCurve().to_json()["observed"][0] is None


# README of the trace folder, whose split is not known; the last fifth of the groups lands within .01 of these. For
# gpt-oss its popularity (.317) and token table (.594) are outside what such splits give (.26 to .30, .58 to .60).
PUBLISHED = {
    "mixtral-8x7b-instruct_mtbench": {
        "random": 0.250,
        "popularity": 0.271,
        "previous_token": 0.356,
        "token_table": 0.518,
        "layer_pair": 0.424,
    },
    "gpt-oss-20b_mixed": {"layer_pair": 0.581},
}


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_free_baselines_reach_the_published_figures(name, shared):
    trace = Trace.open(shared / "traces" / f"{name}.npz")
    rows = list(join_parts(trace))
    groups = list(dict.fromkeys(map(group_of, rows)))
    held_out = set(groups[-round(0.2 * len(groups)) :])
    train = [row for row in rows if group_of(row) not in held_out]
    test = [row for row in rows if group_of(row) in held_out]
    for kind, wanted in PUBLISHED[name].items():
        spec = PredictorSpec(
            family=kind,
            horizon="layer" if kind == "layer_pair" else "token",
            topology=trace.topology,
            stack="causal",
            vocab_size=trace.header.vocab_size or 0,
        )
        predictor = BASELINES[kind](spec).fit(train)
        assert measure(predictor, test).recall(own_k(predictor)) == pytest.approx(wanted, abs=0.0101), kind
