"""The copying predictor layer by layer: calls are the parallel form, and later layers are not looked at."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from foregate.collect.errors import SettingError
from foregate.collect.topology import MoeLayer, MoeTopology
from foregate.predictors.base import PredictorSpec
from foregate.predictors.copy_layers import CopyLayers, CopyLayersSettings
from foregate.predictors.rows import dense, ids_of, many_hot, statistics

UNEVEN = MoeTopology(
    layers=tuple(MoeLayer(stack="causal", block=i, num_experts=e, top_k=2) for i, e in enumerate([8, 5, 7, 8]))
)
SMALL = {"embedding": 6, "hidden": 8, "heads": 2, "attention": 4, "window": 5, "layer_width": 4, "reach": 3}


@pytest.fixture
def network(draw_rows) -> CopyLayers:
    torch.manual_seed(0)
    rows = draw_rows(UNEVEN)
    found = statistics(rows, UNEVEN, 8)
    spec = PredictorSpec(family="copy_layers", horizon="layer", topology=UNEVEN, stack="causal", vocab_size=50)
    made = CopyLayersSettings(**SMALL).build(spec, found.token_ids)
    made.warm_start(found)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return made.eval()


@pytest.fixture
def sequences(draw_rows) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Give ids [B, T], previous and used [B, T, L, E] of sequences longer than the window."""
    rows = draw_rows(UNEVEN, sequences=2, tokens=(13, 14))
    used = torch.tensor(np.stack([many_hot(dense(row, UNEVEN), 8) for row in rows]))
    ids = torch.tensor(np.stack([ids_of(row) for row in rows]))
    return ids, torch.cat([torch.zeros_like(used[:, :1]), used[:, :-1]], dim=1), used


def test_calls_equal_the_parallel_form(network, sequences):
    """Token by token and layer by layer, for every stride, from the start and from the middle of a sequence."""
    ids, previous, used = sequences
    with torch.no_grad():
        whole = [network.layers(ids, previous, used, network.start(2), stride)[1] for stride in (1, 2, 3)]
        _, middle = network(ids[:, :7], previous[:, :7], network.start(2))
        tails = [network.layers(ids[:, 7:], previous[:, 7:], used[:, 7:], middle, stride)[1] for stride in (1, 2, 3)]
        state = network.start(2)
        for t in range(ids.shape[1]):
            _, given = network.step(ids[:, t], previous[:, t], state)
            state = network.follow(state, given)
            context = {name: state[name] for name in network.context}
            for layer in range(-1, 3):
                known = used[:, t].clone()
                known[:, layer + 1 :] = 0
                logits = network.ahead(torch.tensor(layer), known, context)
                for stride, wanted in enumerate(whole, start=1):
                    if layer + stride < 4:
                        row = layer + stride
                        torch.testing.assert_close(logits[:, row], wanted[:, t, row], atol=2e-5, rtol=1e-4)
    for tail, wanted in zip(tails, whole, strict=True):
        torch.testing.assert_close(tail, wanted[:, 7:], atol=2e-5, rtol=1e-4)


def test_the_state_after_a_sequence_is_that_of_its_steps(network, sequences):
    ids, previous, _ = sequences
    with torch.no_grad():
        for num_tokens in (2, 13):
            _, last = network(ids[:, :num_tokens], previous[:, :num_tokens], network.start(2))
            state = network.start(2)
            for t in range(num_tokens):
                _, given = network.step(ids[:, t], previous[:, t], state)
                state = network.follow(state, given)
            assert set(state) == set(last) == set(network.start(1))
            for name in last:
                torch.testing.assert_close(state[name], last[name], atol=1e-5, rtol=1e-5)


def test_rows_depend_on_known_layers_alone(network, sequences):
    ids, previous, used = sequences
    with torch.no_grad():
        for stride in (1, 2):
            wanted = network.layers(ids, previous, used, network.start(2), stride)[1]
            for layer in range(4):
                other = used.clone()
                other[:, :, layer] = other[:, :, layer].roll(1, dims=-1)
                changed = network.layers(ids, previous, other, network.start(2), stride)[1]
                for row in range(4):
                    same = torch.equal(changed[:, :, row], wanted[:, :, row])
                    assert same == (row < layer + stride)


def test_all_parameters_learn(network, sequences):
    ids, previous, used = sequences
    token, layer, _ = network.train().layers(ids % 4, previous, used, network.start(2), 1)
    assert token.reuse is not None
    torch.cat([*token, layer]).square().sum().backward()
    assert not [name for name, p in network.named_parameters() if p.grad is None or not p.grad.any()]


@pytest.mark.parametrize("setting", ["layer_width", "reach"])
def test_bad_settings_are_refused(setting):
    with pytest.raises(SettingError, match=setting):
        CopyLayersSettings(**{setting: 0})
