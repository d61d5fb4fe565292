"""The layers' MLPs: layer by layer equals parallel, what they know, where they start, and how big they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from foregate.collect.errors import SettingError
from foregate.collect.topology import MoeLayer, MoeTopology
from foregate.predictors.base import PredictorSpec
from foregate.predictors.baselines import TokenTable
from foregate.predictors.mlp import MlpSettings
from foregate.predictors.rows import dense, ids_of, many_hot

UNIFORM = MoeTopology.uniform(5, 8, 2)
UNEVEN = MoeTopology(
    layers=tuple(
        MoeLayer(stack="causal", block=i, num_experts=e, top_k=k) for i, (e, k) in enumerate([(4, 1), (8, 3), (6, 2)])
    )
)
SMALL = {"embedding": 6, "hidden": 10, "window": 3, "reach": 3}


@pytest.fixture(scope="module")
def build(build) -> Callable[..., Any]:
    """Build the family's small network."""
    return lambda topology, rows=None, noise=0.3, **settings: build(
        MlpSettings(**(SMALL | settings)), topology, rows=rows, noise=noise
    )


def inputs(topology: MoeTopology, draw_rows) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Give ids [B, T], previous and used [B, T, L, E]."""
    rows = draw_rows(topology, sequences=2, tokens=(11, 12))
    used = torch.tensor(np.stack([many_hot(dense(row, topology), topology.max_experts) for row in rows]))
    ids = torch.tensor(np.stack([ids_of(row) for row in rows]))
    return ids, torch.cat([torch.zeros_like(used[:, :1]), used[:, :-1]], dim=1), used


@pytest.mark.parametrize("window", [3, 4, 9])
@pytest.mark.parametrize("topology", [UNIFORM, UNEVEN], ids=["uniform", "uneven"])
@torch.no_grad()
def test_layer_by_layer_equals_the_parallel_form(topology, window, draw_rows, build):
    network = build(topology, window=window)
    ids, previous, used = inputs(topology, draw_rows)
    whole, last = network(ids, previous, network.start(2))
    state = network.start(2)
    for stride in (1, 2, 3):
        again, wanted, _ = network.layers(ids, previous, used, network.start(2), stride)
        torch.testing.assert_close(again.routing, whole.routing)
        for t in range(ids.shape[1]):
            logits, state = network.step(ids[:, t], previous[:, t], state)
            torch.testing.assert_close(logits.routing, whole.routing[:, t], atol=1e-5, rtol=1e-5)
            for layer in range(-1, topology.num_layers - stride):
                given = network.ahead(torch.tensor(layer), used[:, t], state)[:, layer + stride]
                torch.testing.assert_close(given, wanted[:, t, layer + stride], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(state["token"], last["token"])


@torch.no_grad()
def test_a_row_knows_its_window_up_to_the_stride_and_no_other_token(draw_rows, build):
    network = build(UNIFORM, window=3)
    ids, previous, used = inputs(UNIFORM, draw_rows)

    def said(changed: torch.Tensor, before: torch.Tensor = previous) -> torch.Tensor:
        return network.layers(ids, before, changed, network.start(2), 2)[1]

    for source in range(5):
        other = used.clone()
        other[:, 4, source] = 1 - other[:, 4, source]
        moved = (said(other) - said(used)).abs().sum((0, -1)) > 1e-6
        wanted = torch.zeros(moved.shape, dtype=torch.bool)
        wanted[4, source + 2 : source + 4] = True
        torch.testing.assert_close(moved, wanted)
    torch.testing.assert_close(said(used, torch.zeros_like(previous)), said(used))


@torch.no_grad()
def test_starts_at_the_token_table(draw_rows, build):
    rows = draw_rows(UNIFORM, sequences=60)
    network = build(UNIFORM, noise=0.0, rows=rows, embedding=40)
    table = TokenTable(network.spec).fit(rows)
    frequent = torch.tensor(table.token_ids_[:5])[None]
    blank = torch.zeros(1, 5, *network.spec.shape)
    logits, ahead, _ = network.layers(frequent, blank, blank + 1, network.start(1), 1)
    torch.testing.assert_close(ahead, logits.routing)
    given = network.probabilities(logits.routing)[0].numpy()
    assert np.abs(given - table.predict(frequent.numpy(), np.ones((1, 5), bool))[0]).max() < 0.1


def test_has_the_size_of_the_papers():
    spec = PredictorSpec(
        family="mlp", horizon="layer", topology=MoeTopology.uniform(24, 32, 4), stack="causal", vocab_size=100
    )
    network = MlpSettings().build(spec, np.arange(0))
    assert 1.5e6 < sum(parameter.numel() for parameter in network.parameters()) < 2.5e6


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"hidden": 0}, "hidden must be at least 1, got 0"),
        ({"reach": 0}, "reach must be at least 1, got 0"),
        ({"reach": 4, "window": 3}, "window must be at least the reach of 4.*got 3"),
        ({"dropout": 1.0}, r"dropout must lie in \[0, 1\), got 1.0"),
        ({"forget": -0.1}, "forget"),
    ],
)
def test_refuses_settings_that_mean_nothing(settings, match):
    with pytest.raises(SettingError, match=match):
        MlpSettings(**settings)
