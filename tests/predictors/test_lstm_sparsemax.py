"""The LSTM predictor: its layer against `torch.nn.LSTM`, step by step equals parallel, padding, and where it starts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from foregate.collect.errors import SettingError
from foregate.collect.topology import MoeTopology
from foregate.predictors.baselines import TokenTable
from foregate.predictors.lstm import LstmLayer, LstmState
from foregate.predictors.lstm_sparsemax import LstmSparsemaxSettings
from foregate.predictors.network import TokenNetwork
from foregate.train.losses import distillation

CAUSAL = MoeTopology.uniform(3, 8, 2)
SMALL = LstmSparsemaxSettings(embedding=6, hidden=12, attention=4, window=4)


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
def test_steps_equal_the_parallel_form(build):
    network = build(SMALL, CAUSAL)
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


@torch.no_grad()
def test_starts_at_the_token_table(build, draw_rows):
    rows = draw_rows(CAUSAL, sequences=40)
    network = build(replace(SMALL, embedding=24), CAUSAL, rows=rows, noise=0.0)
    assert isinstance(network, TokenNetwork)
    table = TokenTable(network.spec).fit(rows)
    ids = torch.arange(50)
    logits, _ = network.step(ids, torch.zeros(50, 3, 8), network.start(50))
    mine = network.probabilities(logits.routing).numpy().argsort(-1)[..., -2:]
    theirs = table.predict(ids.numpy()[None], np.ones((1, 50), bool))[0].argsort(-1)[..., -2:]
    assert np.mean([set(a) == set(b) for a, b in zip(mine.reshape(-1, 2), theirs.reshape(-1, 2), strict=True)]) > 0.9


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
