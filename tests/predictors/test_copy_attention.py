"""The copying predictor: steps are the parallel form, memory forgets what is too old, and like tokens are found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from foregate.collect.errors import SettingError
from foregate.collect.topology import MoeLayer, MoeTopology
from foregate.predictors.bundle_writer import write_bundle
from foregate.predictors.copy_attention import CopyAttentionSettings
from foregate.predictors.routing_memory import RoutingMemory
from foregate.predictors.rows import dense, ids_of, many_hot

CAUSAL = MoeTopology.uniform(3, 8, 2)
UNEVEN = MoeTopology(
    layers=tuple(MoeLayer(stack="causal", block=i, num_experts=e, top_k=2) for i, e in enumerate([8, 5]))
)
SMALL = {"embedding": 6, "hidden": 8, "heads": 2, "attention": 4, "window": 5, "decays": (0.5, 0.9)}


@pytest.fixture(scope="module")
def build(build) -> Callable[..., Any]:
    """Build the family's small network."""
    return lambda topology, rows=None, noise=0.3, **settings: build(
        CopyAttentionSettings(**(SMALL | settings)), topology, rows=rows, noise=noise
    )


@pytest.mark.parametrize("discount", [0.0, 0.7])
@pytest.mark.parametrize("topology", [CAUSAL, UNEVEN], ids=["uniform", "uneven"])
def test_steps_equal_the_parallel_form(topology, discount, draw_rows, build):
    """In one piece, in two, and token by token, with a window shorter than the sequence."""
    rows = draw_rows(topology, sequences=2, tokens=(19, 20))
    network = build(topology, rows, discount=discount)
    hot = torch.tensor(np.stack([many_hot(dense(row, topology), network.spec.shape[1]) for row in rows]))
    ids = torch.tensor(np.stack([ids_of(row) for row in rows]))
    previous = torch.cat([torch.zeros_like(hot[:, :1]), hot[:, :-1]], dim=1)
    with torch.no_grad():
        whole, last = network(ids, previous, network.start(2))
        head, middle = network(ids[:, :7], previous[:, :7], network.start(2))
        tail, resumed = network(ids[:, 7:], previous[:, 7:], middle)
        state, steps = network.start(2), []
        for t in range(ids.shape[1]):
            logits, given = network.step(ids[:, t], previous[:, t], state)
            state = network.follow(state, given)
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


def test_all_parameters_learn(draw_rows, build):
    network = build(CAUSAL, noise=0.05).train()
    ids = torch.randint(0, 4, (2, 9))
    logits, _ = network(ids, (torch.rand(2, 9, 3, 8) < 0.25).float(), network.start(2))
    assert logits.reuse is not None
    torch.cat(logits).square().sum().backward()
    assert not [name for name, p in network.named_parameters() if p.grad is None or not p.grad.any()]


def by_the_definition(memory: RoutingMemory, x: torch.Tensor, ids: torch.Tensor, used: torch.Tensor, t: int):
    """Compute what memory says of token t of one sequence, one past token and one head at a time."""
    past = range(max(0, t - memory.window), t)
    weights = torch.zeros(memory.heads, t)
    peaks = torch.zeros(memory.heads, 2)
    for head in range(memory.heads):
        part = slice(head * memory.width, (head + 1) * memory.width)
        scores = {}
        for s in past:
            scores[s] = memory.query(x[t])[part] @ memory.key(x[s])[part] / memory.width**0.5
            scores[s] = scores[s] + memory.same_N[head] * float(ids[s] == ids[t] and ids[t] >= 0)
            scores[s] = scores[s] + memory.age_N[head] * np.log(t - s)
        total = sum(torch.exp(score) for score in scores.values()) + torch.exp(memory.nothing_N[head])
        for s in past:
            weights[head, s] = torch.exp(scores[s]) / total
        peaks[head, 0] = torch.exp(memory.nothing_N[head]) / total
        peaks[head, 1] = weights[head].max() if t else 0
    z = torch.cat([x[t], peaks[:, 0], peaks[:, 1]])
    mix, trust = memory.mix(z).view(2, -1).softmax(-1), torch.nn.functional.softplus(memory.trust(z) + 1)
    out = []
    for index in (0, 1):
        share = torch.zeros(used.shape[1])
        left = torch.tensor(1.0)
        for s in past:
            if index == 0 or s + 1 < t:
                weight = (mix[index] * weights[:, s]).sum()
                share, left = share + weight * used[s + index], left - weight
        share = share + left * memory.popularity_X
        raised = torch.log((share + 0.02) / (memory.popularity_X + 0.02))
        out.append(raised * memory.weight_X[index] * trust[index])
    return out


def test_memory_by_the_definition():
    torch.manual_seed(1)
    memory = RoutingMemory(6, heads=2, width=3, window=4, entries=5)
    with torch.no_grad():
        for parameter in memory.parameters():
            parameter.add_(0.5 * torch.randn_like(parameter))
        memory.popularity_X.copy_(torch.rand(5))
        x, ids, used = torch.randn(9, 6), torch.randint(-1, 3, (9,)), (torch.rand(9, 5) < 0.4).float()
        previous = torch.cat([torch.zeros(1, 5), used[:-1]])
        copied, _ = memory.band(x[None], ids[None], previous[None], memory.empty(1))
        for t in range(9):
            now, after = by_the_definition(memory, x, ids, used, t)
            torch.testing.assert_close(copied.now[0, t], now, atol=1e-5, rtol=1e-4)
            torch.testing.assert_close(copied.next[0, t], after, atol=1e-5, rtol=1e-4)


def test_starts_by_copying_the_same_token(draw_rows, build):
    """Before any gradient, a token that came before raises what it used then, far above what another one would."""
    network = build(CAUSAL, draw_rows(CAUSAL), noise=0.0, window=16)
    used = torch.zeros(1, 12, 3, 8)
    used[..., 0] = 1
    used[0, 2] = 0
    used[0, 2, :, 5] = 1
    ids = torch.full((1, 12), 4)
    ids[0, 2] = 6
    ids[0, 11] = 6
    previous = torch.cat([torch.zeros(1, 1, 3, 8), used[:, :-1]], dim=1)
    changed = ids.clone()
    changed[0, 2] = 8
    with torch.no_grad():
        logits, _ = network(ids, previous, network.start(1))
        other, _ = network(changed, previous, network.start(1))
    assert (logits.routing[0, 11, :, 5] > other.routing[0, 11, :, 5] + 0.1).all()


@pytest.mark.parametrize(
    ("setting", "value"),
    [("hidden", 0), ("heads", 0), ("window", 1), ("decays", ()), ("dropout", 1.0), ("discount", 1.0), ("forget", -0.1)],
)
def test_bad_settings_are_refused(setting, value):
    with pytest.raises(SettingError, match=setting):
        CopyAttentionSettings(**{setting: value})


def test_an_expert_that_is_never_expected_is_exported_with_its_reuse(tmp_path, draw_rows, build):
    """A logit of -150, as the start token has: its sigmoid is 0 in float32, and the reuse head reads the logarithm."""
    network = build(CAUSAL, draw_rows(CAUSAL))
    with torch.no_grad():
        network.heads.bias[::3] = -150.0
    bundle = write_bundle(tmp_path / "bundle", network)
    assert bundle.card["parity"]["max_abs_diff"] < 1e-4
