"""Losses by hand, and what they ignore."""

from __future__ import annotations

import math

import pytest
import torch
from foregate.train.losses import LOSSES, discounted_uses, reuse_loss
from foregate.train.module import many_hot


@pytest.mark.parametrize("link", sorted(LOSSES))
def test_what_does_not_count_does_not_count(link):
    torch.manual_seed(0)
    logits, used = torch.randn(2, 5, 3, 4), (torch.rand(2, 5, 3, 4) < 0.5).float()
    used[..., 3] = 0
    exists = torch.tensor([[True, True, True, False]]).expand(3, 4)
    scored = torch.ones(2, 5, dtype=torch.bool)
    scored[1, 2:] = False
    loss = LOSSES[link](logits, used, exists, scored)
    other = logits.clone()
    other[1, 2:] = 9
    other[..., 3] = 5
    torch.testing.assert_close(LOSSES[link](other, used, exists, scored), loss)
    assert LOSSES[link](logits, used, exists, torch.zeros_like(scored)) == 0


def test_values_by_hand():
    logits = torch.zeros(1, 1, 1, 4)
    used = torch.tensor([[[[1.0, 1.0, 0.0, 0.0]]]])
    exists, scored = torch.ones(1, 4, dtype=torch.bool), torch.ones(1, 1, dtype=torch.bool)
    assert LOSSES["sigmoid"](logits, used, exists, scored).item() == pytest.approx(4 * math.log(2))
    assert LOSSES["softmax"](logits, used, exists, scored).item() == pytest.approx(math.log(4))


def test_many_hot_leaves_out_what_is_absent():
    out = many_hot(torch.tensor([[[0, 2], [-1, 1], [-1, -1]]], dtype=torch.int16), 3)
    assert out.tolist() == [[[1, 0, 1], [0, 1, 0], [0, 0, 0]]]


@pytest.mark.parametrize("discount", [0.3, 0.8])
def test_discounted_uses_by_the_definition(discount):
    used, after = (torch.rand(2, 6, 3, 4) < 0.3).float(), (torch.rand(2, 5, 3, 4) < 0.3).float()
    found, whole = discounted_uses(used, after, discount), torch.cat([used, after], dim=1)
    for t in range(6):
        wanted = sum(discount ** (later - t - 1) * whole[:, later] for later in range(t + 1, 11))
        torch.testing.assert_close(found[:, t], wanted)


def test_reuse_loss_counts_tokens_with_a_future():
    exists, scored = torch.ones(1, 4, dtype=torch.bool), torch.ones(1, 2, dtype=torch.bool)
    uses = torch.tensor([[[[2.0, 0.0, 2.0, 0.0]], [[0.0, 0.0, 0.0, 0.0]]]])
    logits = torch.zeros(1, 2, 1, 4)
    assert reuse_loss(logits, uses, exists, scored).item() == pytest.approx(math.log(4))
    logits[0, 0, 0] = torch.tensor([9.0, -90, 9, -90])
    logits[0, 1, 0] = torch.tensor([-90.0, 9, 9, 9])  # of the last token nothing is known
    assert reuse_loss(logits, uses, exists, scored).item() == pytest.approx(math.log(2), abs=1e-4)
    assert reuse_loss(logits, uses, exists, ~scored) == 0
