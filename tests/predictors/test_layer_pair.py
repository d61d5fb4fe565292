"""The layer-pair table: what it says several layers ahead is what was counted at that distance."""

from __future__ import annotations

import numpy as np
import pytest
from foregate.collect.topology import MoeLayer, MoeTopology
from foregate.predictors.base import LayerPredictor, PredictorSpec
from foregate.predictors.baselines import LayerPair
from foregate.predictors.rows import dense, many_hot

UNEVEN = MoeTopology(
    layers=tuple(MoeLayer(stack="causal", block=i, num_experts=e, top_k=2) for i, e in enumerate([6, 5, 6, 4]))
)


def spec_of(topology: MoeTopology) -> PredictorSpec:
    return PredictorSpec(family="layer_pair", horizon="layer", topology=topology, stack="causal", vocab_size=50)


@pytest.mark.parametrize("reach", [1, 2, 3, 7])
def test_counts_each_distance_apart(reach, draw_rows):
    rows = draw_rows(UNEVEN, sequences=8)
    fitted = LayerPair(spec_of(UNEVEN), reach=reach).fit(rows)
    assert isinstance(fitted, LayerPredictor)
    hot = np.concatenate([many_hot(dense(row, UNEVEN), 6) for row in rows])
    used = hot[:5].copy()
    used[4, 1] = 0  # this token used nothing there
    for layer in range(-1, 4):
        given = fitted.ahead(layer, used, None)
        wanted = np.zeros_like(given)
        for row in range(layer + 1, min(layer + 1 + reach, 4)):
            for token in range(5):
                chosen = np.flatnonzero(used[token, layer]) if layer >= 0 else []
                shares = [hot[hot[:, layer, expert] > 0, row].mean(0) for expert in chosen]
                wanted[token, row] = np.mean(shares, axis=0) if len(shares) else hot[:, row].mean(0)
        np.testing.assert_allclose(given, wanted, atol=1e-6)


def test_farther_ahead_changes_nothing_nearby(draw_rows):
    rows = draw_rows(UNEVEN, sequences=8)
    near, far = (LayerPair(spec_of(UNEVEN), reach=reach).fit(rows) for reach in (1, 3))
    used = many_hot(dense(rows[0], UNEVEN), 6)
    np.testing.assert_array_equal(near.sequence_ahead(used), far.sequence_ahead(used))
    np.testing.assert_array_equal(near.ahead(0, used, None)[:, 1], far.ahead(0, used, None)[:, 1])


def test_a_single_layer_has_nothing_ahead(draw_rows):
    one = MoeTopology.uniform(1, 4, 2)
    rows = draw_rows(one, sequences=3)
    fitted = LayerPair(spec_of(one), reach=2).fit(rows)
    used = many_hot(dense(rows[0], one), 4)
    assert not fitted.ahead(0, used, None).any()
    assert not fitted.sequence_ahead(used).any()
    assert fitted.ahead(-1, used, None)[:, 0].all()
