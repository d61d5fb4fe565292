"""Forecasts: rows of a predictor spread over a whole model, tokens combined."""

from __future__ import annotations

import numpy as np
import pytest
from foregate.collect.topology import MoeLayer, MoeTopology
from foregate.predictors.base import PredictorSpec
from foregate.runtime.forecast import FlatMap, union

LAYERS = (
    MoeLayer(stack="encoder", block=1, num_experts=3, top_k=1),
    MoeLayer(stack="decoder", block=0, num_experts=4, top_k=2),
    MoeLayer(stack="decoder", block=1, num_experts=2, top_k=1),
)
TOPOLOGY = MoeTopology(layers=LAYERS)


def spec(stack: str) -> PredictorSpec:
    return PredictorSpec(family="test", horizon="token", topology=TOPOLOGY, stack=stack, vocab_size=9)  # type: ignore[arg-type]


def test_rows_land_at_their_layers_and_padding_nowhere() -> None:
    flat_map = FlatMap(spec("decoder"), TOPOLOGY)
    probs_LE = np.array([[0.1, 0.2, 0.3, 0.4], [0.5, 0.6, 9.0, 9.0]], np.float32)
    demand = flat_map.flat(probs_LE)
    assert demand.dtype == np.float32
    np.testing.assert_allclose(demand, [0, 0, 0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6])
    np.testing.assert_allclose(
        FlatMap(spec("encoder"), TOPOLOGY).flat(np.array([[0.7, 0.8, 0.9]])), [0.7, 0.8, 0.9, 0, 0, 0, 0, 0, 0], 1e-6
    )
    several = np.stack([probs_LE, 2 * probs_LE])
    np.testing.assert_array_equal(flat_map.flat(several), np.stack([flat_map.flat(item) for item in several]))


def test_used_experts_are_marked_and_dropped_ones_are_not() -> None:
    flat_map = FlatMap(spec("decoder"), TOPOLOGY)
    ids = [np.array([[3, 0], [-1, 2]]), np.array([[1], [-1]])]
    used_TLE = flat_map.multi_hot(ids, (2, 4))
    assert used_TLE.tolist() == [[[1, 0, 0, 1], [0, 1, 0, 0]], [[0, 0, 1, 0], [0, 0, 0, 0]]]


def test_union_is_the_probability_of_at_least_one() -> None:
    probs = np.array([[0.5, 0.0], [0.5, 1.0]])
    assert union(probs, 1).tolist() == [0.75, 1.0]
    assert union(probs.reshape(1, 2, 2), 2).tolist() == [0.75, 1.0]
    assert union(np.array([[0.3, 0.6]]), 1).tolist() == pytest.approx([0.3, 0.6])
