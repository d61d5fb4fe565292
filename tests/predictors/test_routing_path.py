"""The routing-path transformer: attention by hand, step by step equals parallel, padding, size and where it starts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from foregate.collect.errors import SettingError
from foregate.collect.topology import MoeLayer, MoeTopology
from foregate.predictors.base import PredictorSpec
from foregate.predictors.baselines import TokenTable
from foregate.predictors.distance_attention import Blocks, DistanceAttention, DistanceBias
from foregate.predictors.network import TokenNetwork
from foregate.predictors.routing_path import RoutingPathSettings
from foregate.predictors.rows import statistics

CAUSAL = MoeTopology.uniform(3, 8, 2)
SMALL = RoutingPathSettings(hidden=8, feed_forward=12, encoder_layers=2, heads=2, window=4)


@torch.no_grad()
def test_attention_by_its_definition():
    torch.manual_seed(0)
    attention, bias = DistanceAttention(6, 2, 3), torch.randn(2, 5, 5)
    x, allowed = torch.randn(1, 5, 6), torch.rand(1, 5, 5) < 0.7
    allowed |= torch.eye(5, dtype=torch.bool)
    given = attention(x, attention.key_value(x), allowed, bias)
    queries, (keys, values) = attention.query(x)[0], attention.key_value(x)[0].chunk(2, dim=-1)
    out = torch.zeros(5, 6)
    for t in range(5):
        for head in range(2):
            part = slice(3 * head, 3 * head + 3)
            seen = [s for s in range(5) if allowed[0, t, s]]
            scores = torch.stack([queries[t, part] @ keys[s, part] / 3**0.5 + bias[head, t, s] for s in seen])
            out[t, part] = scores.softmax(0) @ values[seen][:, part]
    torch.testing.assert_close(given[0], attention.out(out))


def test_near_distances_are_told_apart_and_far_ones_ever_less():
    bias = DistanceBias(1, both_sides=True)
    with torch.no_grad():
        bias.table.copy_(torch.arange(len(bias.table))[:, None])
    ages = torch.arange(-300, 301)
    buckets = bias(ages[None])[0, 0].long()
    by_age = dict(zip(ages.tolist(), buckets.tolist(), strict=True))
    assert [by_age[age] for age in range(16)] == list(range(16))
    before, after = ([by_age[sign * age] for age in range(1, 301)] for sign in (1, -1))
    assert not set(before) & set(after)
    assert before == sorted(before)
    assert before[126] == before[-1] == 31  # 127 steps and more
    assert before[100] < 31
    assert [value - 32 for value in after] == before


def test_blocks_see_the_window_and_nothing_else():
    blocks = Blocks(10, 4, torch.device("cpu"))
    positions = torch.arange(-4, 10, dtype=torch.float32)[None, :, None]  # a ring of four before ten steps
    sources, queries = blocks.sources(positions)[0, ..., 0], blocks.queries(positions[:, 4:])[0, ..., 0]
    for t in range(10):
        seen = sources[t // 4][blocks.inside_TS[t % 4]]
        assert seen.tolist() == list(range(t - 3, t + 1))
        assert queries[t // 4, t % 4] == t
    torch.testing.assert_close(blocks.join(blocks.queries(positions[:, 4:])), positions[:, 4:])


@pytest.mark.parametrize("tokens", [3, 19])
@torch.no_grad()
def test_steps_equal_the_parallel_form(tokens, build):
    network = build(SMALL, CAUSAL)
    assert isinstance(network, TokenNetwork)
    ids, previous = torch.randint(-1, 55, (2, tokens)), torch.zeros(2, tokens, 3, 8)
    whole, last = network(ids, previous, network.start(2))
    head, middle = network(ids[:, :2], previous[:, :2], network.start(2))
    tail, _ = network(ids[:, 2:], previous[:, 2:], middle)
    torch.testing.assert_close(torch.cat([head.routing, tail.routing], dim=1), whole.routing, atol=1e-5, rtol=1e-5)
    state = network.start(2)
    for t in range(tokens):
        logits, given = network.step(ids[:, t], previous[:, t], state)
        state = network.follow(state, given)
        torch.testing.assert_close(logits.routing, whole.routing[:, t], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(state["seen"], last["seen"], atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_a_causal_token_sees_as_far_as_its_layers_reach(build):
    network = build(replace(SMALL, encoder_layers=1, decoder_layers=1), CAUSAL)
    assert isinstance(network, TokenNetwork)
    ids = torch.arange(0, 40, 2)[None]
    other = ids.clone()
    other[0, 4] = 48
    given = [network(each, torch.zeros(1, 20, 3, 8), network.start(1))[0].routing[0] for each in (ids, other)]
    moved = ((given[0] - given[1]).abs() > 1e-7).flatten(1).any(1)
    assert not moved[:4].any()
    assert moved[4:11].all()
    assert not moved[14:].any()  # three attentions of three steps back each


@torch.no_grad()
def test_starts_near_the_token_table(build, draw_rows):
    rows = draw_rows(CAUSAL, sequences=40)
    network = build(replace(SMALL, hidden=24), CAUSAL, rows=rows, noise=0.0)
    assert isinstance(network, TokenNetwork)
    table = TokenTable(network.spec).fit(rows)
    ids = torch.as_tensor(statistics(rows, CAUSAL, 8).token_ids[:12])  # scaled to one length, rare ones are off
    logits, _ = network.step(ids, torch.zeros(12, 3, 8), network.start(12))
    mine = network.probabilities(logits.routing).numpy().argsort(-1)[..., -2:]
    theirs = table.predict(ids.numpy()[None], np.ones((1, 12), bool))[0].argsort(-1)[..., -2:]
    assert np.mean([set(a) == set(b) for a, b in zip(mine.reshape(-1, 2), theirs.reshape(-1, 2), strict=True)]) > 0.8


def test_is_as_large_as_in_its_paper():
    layers = [MoeLayer(stack="encoder", block=2 * i + 1, num_experts=128, top_k=1) for i in range(12)]
    spec = PredictorSpec(
        family="routing_path",
        horizon="batch",
        topology=MoeTopology(layers=tuple(layers)),
        stack="encoder",
        vocab_size=32128,
    )
    network = RoutingPathSettings().build(spec, np.arange(32128))
    size = 4 * sum(parameter.numel() for parameter in network.parameters())
    assert size == pytest.approx(7.21e6, rel=0.03)


@pytest.mark.parametrize(("setting", "value"), [("heads", 3), ("hidden", 0), ("window", 0), ("forget", 1.0)])
def test_bad_settings_are_refused(setting, value):
    with pytest.raises(SettingError, match=setting):
        RoutingPathSettings(**{setting: value})
