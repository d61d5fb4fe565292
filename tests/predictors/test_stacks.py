"""Families that predict a sequence at once where it is read at once: padding, who looks ahead, and that all learns."""

from __future__ import annotations

import pytest
import torch
from foregate.collect.topology import MoeLayer, MoeTopology
from foregate.predictors.lstm_sparsemax import LstmSparsemaxSettings
from foregate.predictors.network import BatchNetwork, TokenNetwork
from foregate.predictors.routing_path import RoutingPathSettings
from foregate.predictors.sru_attention import SruAttentionSettings

CAUSAL = MoeTopology.uniform(3, 8, 2)
SWITCH = MoeTopology(
    layers=tuple(MoeLayer(stack=s, block=i, num_experts=6, top_k=1) for s in ("encoder", "decoder") for i in (1, 3))
)
FAMILIES = [
    LstmSparsemaxSettings(embedding=6, hidden=12, attention=4, window=4),
    RoutingPathSettings(hidden=8, feed_forward=12, encoder_layers=2, heads=2, window=4),
    SruAttentionSettings(embedding=6, hidden=12, attention=4, window=4),
]

pytestmark = pytest.mark.parametrize("settings", FAMILIES, ids=lambda settings: settings.family)


@pytest.mark.parametrize("stack", ["encoder", "decoder"])
@torch.no_grad()
def test_padding_changes_nothing_elsewhere(settings, stack, build):
    network = build(settings, SWITCH, stack)
    assert isinstance(network, BatchNetwork)
    ids, steps = torch.randint(0, 50, (2, 9)), torch.arange(9)
    for first, last in ((0, 5), (2, 7)):
        padded = network(ids, torch.stack([steps < 9, (steps >= first) & (steps < last)]))
        alone = network(ids[1:, first:last], torch.ones(1, last - first, dtype=torch.bool))
        torch.testing.assert_close(padded[1, first:last], alone[0])
        assert torch.isfinite(padded).all()


@torch.no_grad()
def test_a_decoder_does_not_look_ahead_and_an_encoder_does(settings, build):
    ids = torch.arange(0, 16, 2)[None]  # even ids are known here
    other = ids.clone()
    other[0, -1] = 40
    mask = torch.ones_like(ids, dtype=torch.bool)
    for stack, same in [("decoder", True), ("encoder", False)]:
        network = build(settings, SWITCH, stack)
        assert torch.equal(network(ids, mask)[0, :-1], network(other, mask)[0, :-1]) == same


def test_all_parameters_learn(settings, build):
    for network in (build(settings, CAUSAL, noise=0.01), build(settings, SWITCH, "encoder", noise=0.01)):
        network.train()
        ids = torch.randint(0, 50, (2, 9))
        if isinstance(network, TokenNetwork):
            used = (torch.rand(2, 9, 3, 8) < 0.25).float()
            out = network(ids, used, network.start(2))[0].routing
        else:
            out = network(ids, torch.arange(9) < torch.tensor([[9], [6]]))
        (out**2).sum().backward()
        still = [name for name, p in network.named_parameters() if p.grad is None or not p.grad.any()]
        assert not still
