"""The LSTM predictor: its layer against `torch.nn.LSTM`, step by step equals parallel, padding, and where it starts."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from foregate.collect.errors import SettingError
from foregate.collect.topology import MoeLayer, MoeTopology
from foregate.predictors.base import PredictorSpec
from foregate.predictors.baselines import TokenTable
from foregate.predictors.lstm import LstmLayer, LstmState
from foregate.predictors.lstm_sparsemax import LstmSparsemaxSettings
from foregate.predictors.network import BatchNetwork, Network, TokenNetwork
from foregate.predictors.rows import statistics
from foregate.train.losses import distillation

CAUSAL = MoeTopology.uniform(3, 8, 2)
SWITCH = MoeTopology(
    layers=tuple(MoeLayer(stack=s, block=i, num_experts=6, top_k=1) for s in ("encoder", "decoder") for i in (1, 3))
)
SMALL = {"embedding": 6, "hidden": 12, "attention": 4, "window": 4}


def build(topology: MoeTopology, stack: str = "causal", *, rows=None, noise: float = 0.3, **settings) -> Network:
    torch.manual_seed(0)
    chosen = LstmSparsemaxSettings(**(SMALL | settings))
    spec = PredictorSpec(
        family="lstm_sparsemax", horizon=chosen.horizon(stack), topology=topology, stack=stack, vocab_size=50
    )
    found = None if rows is None else statistics(rows, topology, spec.shape[1])
    network = chosen.build(spec, np.arange(0, 50, 2) if found is None else found.token_ids)
    if found is not None:
        network.warm_start(found)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(noise * torch.randn_like(parameter))
    return network.eval()


@pytest.mark.parametrize("bidirectional", [False, True])
@torch.no_grad()
def test_padding_anywhere_is_as_if_it_were_not_there(bidirectional):
    torch.manual_seed(0)
    layer = LstmLayer(5, 4, bidirectional=bidirectional)
    x, mask = torch.randn(9, 4, 5), torch.rand(9, 4) < 0.6
    mask[:, 0] = True
    mask[:, 1] = torch.arange(9) < 4
    mask[:, 2] = False
    given = layer(x, mask)
    assert (given[~mask] == 0).all()
    assert mask[:, 3].any()
    for index in (0, 1, 3):
        kept = mask[:, index]
        alone = x[kept][:, index : index + 1]
        wanted = [direction(part)[0] for direction, part in zip(layer.directions, (alone, alone.flip(0)), strict=False)]
        if bidirectional:
            wanted[1] = wanted[1].flip(0)
        torch.testing.assert_close(given[kept][:, index], torch.cat(wanted, dim=-1)[:, 0])
    torch.testing.assert_close(layer._scan(x, mask), given)  # as it is exported
    torch.testing.assert_close(layer(x), layer(x, torch.ones(9, 4, dtype=torch.bool)))


@torch.no_grad()
def test_a_layer_steps_as_it_runs():
    torch.manual_seed(0)
    layer = LstmLayer(5, 4)
    x, state = torch.randn(9, 2, 5), layer.start(2)
    whole, last = layer.resume(x, state)
    torch.testing.assert_close(whole, layer(x))
    for t in range(9):
        hidden, state = layer.step(x[t], state)
        torch.testing.assert_close(hidden, whole[t])
    torch.testing.assert_close(torch.stack(state), torch.stack(last))
    resumed, _ = layer.resume(x[5:], LstmState(*layer.resume(x[:5], layer.start(2))[1]))
    torch.testing.assert_close(resumed, whole[5:])


@torch.no_grad()
def test_steps_equal_the_parallel_form():
    network = build(CAUSAL)
    assert isinstance(network, TokenNetwork)
    ids, previous = torch.randint(-1, 55, (2, 19)), (torch.rand(2, 19, 3, 8) < 0.25).float()
    whole, last = network(ids, previous, network.start(2))
    head, middle = network(ids[:, :7], previous[:, :7], network.start(2))
    tail, _ = network(ids[:, 7:], previous[:, 7:], middle)
    torch.testing.assert_close(torch.cat([head.routing, tail.routing], dim=1), whole.routing, atol=1e-5, rtol=1e-5)
    state = network.start(2)
    for t in range(19):
        logits, given = network.step(ids[:, t], previous[:, t], state)
        state = network.follow(state, given)
        torch.testing.assert_close(logits.routing, whole.routing[:, t], atol=1e-5, rtol=1e-5)
    assert set(state) == set(last) == set(network.start(1))
    for name in last:
        torch.testing.assert_close(state[name], last[name], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("stack", ["encoder", "decoder"])
@torch.no_grad()
def test_padding_changes_nothing_elsewhere(stack):
    network = build(SWITCH, stack)
    assert isinstance(network, BatchNetwork)
    ids = torch.randint(0, 50, (2, 9))
    mask = torch.arange(9) < torch.tensor([[9], [5]])
    padded = network(ids, mask)
    torch.testing.assert_close(padded[1, :5], network(ids[1:, :5], mask[1:, :5])[0])
    assert torch.isfinite(padded).all()


@torch.no_grad()
def test_a_decoder_does_not_look_ahead_and_an_encoder_does():
    ids = torch.arange(0, 16, 2)[None]  # even ids are known here
    other = ids.clone()
    other[0, -1] = 40
    mask = torch.ones_like(ids, dtype=torch.bool)
    for stack, same in [("decoder", True), ("encoder", False)]:
        network = build(SWITCH, stack)
        assert torch.equal(network(ids, mask)[0, :-1], network(other, mask)[0, :-1]) == same


@torch.no_grad()
def test_starts_at_the_token_table(draw_rows):
    rows = draw_rows(CAUSAL, sequences=40)
    network = build(CAUSAL, rows=rows, noise=0.0, embedding=24)
    assert isinstance(network, TokenNetwork)
    table = TokenTable(network.spec).fit(rows)
    ids = torch.arange(50)
    logits, _ = network.step(ids, torch.zeros(50, 3, 8), network.start(50))
    mine = network.probabilities(logits.routing).numpy().argsort(-1)[..., -2:]
    theirs = table.predict(ids.numpy()[None], np.ones((1, 50), bool))[0].argsort(-1)[..., -2:]
    assert np.mean([set(a) == set(b) for a, b in zip(mine.reshape(-1, 2), theirs.reshape(-1, 2), strict=True)]) > 0.9


def test_all_parameters_learn():
    for network in (build(CAUSAL, noise=0.01), build(SWITCH, "encoder", noise=0.01)):
        network.train()
        ids = torch.randint(0, 50, (2, 9))
        if isinstance(network, TokenNetwork):
            out = network(ids, torch.zeros(2, 9, 3, 8), network.start(2))[0].routing
        else:
            out = network(ids, torch.arange(9) < torch.tensor([[9], [6]]))
        (out**2).sum().backward()
        still = [name for name, p in network.named_parameters() if p.grad is None or not p.grad.any()]
        assert not still


def test_asks_for_the_distillation_of_its_paper():
    assert distillation(LstmSparsemaxSettings()) == (30, 200)
    assert distillation(LstmSparsemaxSettings(distill_top=0)) is None


@pytest.mark.parametrize(
    ("setting", "value"),
    [("hidden", 7), ("num_layers", 0), ("dropout", 1.0), ("attention_weights", "hard"), ("link", "x")],
)
def test_bad_settings_are_refused(setting, value):
    with pytest.raises(SettingError, match=setting):
        LstmSparsemaxSettings(**{setting: value})
