"""The SRU predictor: step by step equals parallel, padding and unknown ids, and where it starts."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from foregate.collect.errors import SettingError
from foregate.collect.topology import MoeLayer, MoeTopology
from foregate.predictors.base import PredictorSpec
from foregate.predictors.baselines import TokenTable
from foregate.predictors.network import Network, TokenNetwork
from foregate.predictors.rows import dense, ids_of, many_hot, statistics
from foregate.predictors.sru_attention import SruAttentionSettings

CAUSAL = MoeTopology.uniform(3, 8, 2)
UNEVEN = MoeTopology(
    layers=tuple(MoeLayer(stack="causal", block=i, num_experts=e, top_k=k) for i, (e, k) in enumerate([(4, 1), (8, 3)]))
)
SWITCH = MoeTopology(
    layers=tuple(MoeLayer(stack=s, block=i, num_experts=6, top_k=1) for s in ("encoder", "decoder") for i in (1, 3))
)
SMALL = {"embedding": 6, "hidden": 12, "attention": 4, "window": 4}


def build(topology: MoeTopology, stack: str = "causal", *, rows=None, noise: float = 0.3, **settings) -> Network:
    torch.manual_seed(0)
    chosen = SruAttentionSettings(**(SMALL | settings))
    spec = PredictorSpec(
        family="sru_attention", horizon=chosen.horizon(stack), topology=topology, stack=stack, vocab_size=50
    )
    network = chosen.build(spec, np.arange(0, 50, 2))
    if rows is not None:
        network = chosen.build(spec, statistics(rows, topology, spec.shape[1]).token_ids)
        network.warm_start(statistics(rows, topology, spec.shape[1]))
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(noise * torch.randn_like(parameter))
    return network.eval()


@pytest.mark.parametrize("discount", [0.0, 0.8])
@pytest.mark.parametrize("topology", [CAUSAL, UNEVEN], ids=["uniform", "uneven"])
def test_steps_equal_the_parallel_form(topology, discount, draw_rows):
    network = build(topology, discount=discount)
    assert isinstance(network, TokenNetwork)
    rows = draw_rows(topology, sequences=2, tokens=(19, 20))
    hot = torch.tensor(np.stack([many_hot(dense(row, topology), network.spec.shape[1]) for row in rows]))
    ids = torch.tensor(np.stack([ids_of(row) for row in rows]))
    previous = torch.cat([torch.zeros_like(hot[:, :1]), hot[:, :-1]], dim=1)
    with torch.no_grad():
        whole, last = network(ids, previous, network.start(2))
        head, middle = network(ids[:, :7], previous[:, :7], network.start(2))
        tail, resumed = network(ids[:, 7:], previous[:, 7:], middle)
        state, steps = network.start(2), []
        for t in range(ids.shape[1]):
            logits, state = network.step(ids[:, t], previous[:, t], state)
            steps.append(logits)
    assert (whole.reuse is None) == (discount == 0)
    for index, wanted in enumerate(whole):
        if wanted is None:
            continue
        stepped = torch.stack([step[index] for step in steps], dim=1)
        torch.testing.assert_close(stepped, wanted, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(torch.cat([head[index], tail[index]], dim=1), wanted, atol=1e-5, rtol=1e-5)
    assert set(state) == set(last) == set(network.start(1))
    for name in last:
        torch.testing.assert_close(state[name], last[name], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(resumed[name], last[name], atol=1e-5, rtol=1e-5)


def test_starts_at_the_token_table(draw_rows):
    rows = draw_rows(CAUSAL, sequences=40)
    network = build(CAUSAL, rows=rows, noise=0.0, embedding=24)
    assert isinstance(network, TokenNetwork)
    table = TokenTable(network.spec).fit(rows)
    ids = torch.arange(50)
    with torch.no_grad():
        logits, _ = network.step(ids, torch.zeros(50, 3, 8), network.start(50))
    mine = network.probabilities(logits.routing).numpy().argsort(-1)[..., -2:]
    theirs = table.predict(ids.numpy()[None], np.ones((1, 50), bool))[0].argsort(-1)[..., -2:]
    assert np.mean([set(a) == set(b) for a, b in zip(mine.reshape(-1, 2), theirs.reshape(-1, 2), strict=True)]) > 0.9


def test_unknown_ids_share_a_row():
    network = build(CAUSAL)
    assert isinstance(network, TokenNetwork)
    ids = torch.tensor([1, 3, -1, 50, 10**9])  # odd ids are not known here
    with torch.no_grad():
        logits, _ = network.step(ids, torch.zeros(5, 3, 8), network.start(5))
    torch.testing.assert_close(logits.routing, logits.routing[:1].expand(5, -1, -1))


def test_probabilities_of_absent_experts_are_zero():
    for link in ("sigmoid", "softmax"):
        network = build(UNEVEN, link=link)
        probabilities = network.probabilities(torch.randn(5, 2, 8))
        assert (probabilities[:, 0, 4:] == 0).all()
        assert ((probabilities >= 0) & (probabilities <= 1)).all()
        if link == "softmax":
            torch.testing.assert_close(probabilities[:, 0].sum(-1), torch.ones(5))


def test_all_parameters_learn():
    for network in (build(CAUSAL, noise=0.01, discount=0.5), build(SWITCH, "encoder", noise=0.01)):
        network.train()
        ids = torch.randint(0, 50, (2, 9))
        if isinstance(network, TokenNetwork):
            logits = network(ids, (torch.rand(2, 9, 3, 8) < 0.25).float(), network.start(2))[0]
            assert logits.reuse is not None
            out = torch.cat(logits)
        else:
            out = network(ids, torch.ones(2, 9, dtype=torch.bool))
        (out**2).sum().backward()
        still = [name for name, p in network.named_parameters() if p.grad is None or not p.grad.any()]
        assert not still


@pytest.mark.parametrize(
    ("setting", "value"),
    [("hidden", 7), ("num_layers", 0), ("decays", ()), ("decays", (1.0,)), ("dropout", 1.0), ("link", "x")],
)
def test_bad_settings_are_refused(setting, value):
    with pytest.raises(SettingError, match=setting):
        SruAttentionSettings(**{setting: value})
