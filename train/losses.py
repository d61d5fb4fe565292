"""Losses between logits and the experts that tokens used, or what their routers scored. Knows tensors and settings.

A family chooses by its settings: `link` says how it is held to the experts used, `discount` > 0 adds the reuse loss,
`distill_top` > 0 adds `distill_weight` x the distillation from the router's own scores, where a trace has them. SiDA's
loss, 0.005 x cross-entropy + distillation of the 30 largest, is `distill_top` 30 and `distill_weight` 200, times 0.005.
"""

# B batch, T tokens, L MoE layers, E experts

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..collect.errors import SettingError
from ..predictors.network import ABSENT, Link, NetworkSettings


class Distillation(NamedTuple):
    """How a family learns from its router's scores."""

    top: int
    """Experts of a layer, those with the largest scores, that are compared."""
    weight: float
    """Weight beside the loss of the routing."""


def distillation(settings: NetworkSettings) -> Distillation | None:
    """Give the distillation that a family's settings ask for by `distill_top` and `distill_weight`, if any.

    Raises:
        SettingError: if one of them is negative.
    """
    found = Distillation(settings.distill_top, settings.distill_weight)
    for name, value in found._asdict().items():
        if value < 0:
            raise SettingError(f"distill_{name} must not be negative, got {value}.")
    return found if found.top and found.weight else None


def binary_loss(logits_BTLE: Tensor, used_BTLE: Tensor, exists_LE: Tensor, scored_BT: Tensor) -> Tensor:
    """Give the binary cross-entropy of each expert, summed over a layer, per token and layer."""
    losses = F.binary_cross_entropy_with_logits(logits_BTLE, used_BTLE, reduction="none")
    return _mean((losses * exists_LE).sum(-1), scored_BT)


def soft_target_loss(logits_BTLE: Tensor, used_BTLE: Tensor, exists_LE: Tensor, scored_BT: Tensor) -> Tensor:
    """Give the cross-entropy to the token's experts, equal in weight; layers where it used none count nothing."""
    target = used_BTLE / used_BTLE.sum(-1, keepdim=True).clamp(min=1)
    logs = torch.log_softmax(logits_BTLE.masked_fill(~exists_LE, ABSENT), dim=-1)
    return _mean(-(target * logs).sum(-1), scored_BT)


def discounted_uses(used_BTLE: Tensor, after_BFLE: Tensor, discount: float) -> Tensor:
    """Give the uses after each token, sum over j >= 1 of discount^(j - 1) used[t + j]: [B, T, L, E].

    `after` are the tokens that follow the T; uses beyond them are left out.
    """
    out = torch.empty_like(used_BTLE)
    total_BLE = torch.zeros_like(used_BTLE[:, 0])
    for later_BLE in after_BFLE.flip(1).unbind(1):
        total_BLE = later_BLE + discount * total_BLE
    for t in range(used_BTLE.shape[1] - 1, -1, -1):
        out[:, t] = total_BLE
        total_BLE = used_BTLE[:, t] + discount * total_BLE
    return out


def reuse_loss(logits_BTLE: Tensor, uses_BTLE: Tensor, exists_LE: Tensor, scored_BT: Tensor) -> Tensor:
    """Give the cross-entropy to the shares of each layer's discounted uses; a token without any after it counts not."""
    known_BT = scored_BT & (uses_BTLE.sum((-1, -2)) > 0)
    target = uses_BTLE / uses_BTLE.sum(-1, keepdim=True).clamp(min=1e-6)
    logs = torch.log_softmax(logits_BTLE.masked_fill(~exists_LE, ABSENT), dim=-1)
    return _mean(-(target * logs).sum(-1), known_BT)


def distill_loss(logits_BTLE: Tensor, scores_BTLE: Tensor, exists_LE: Tensor, scored_BT: Tensor, top: int) -> Tensor:
    """Give the L1 distance of two softmaxes over the `top` experts that the router scored highest in a layer.

    Scores that are shares of a layer already (not negative, summing to 1) are the router's softmax: their logarithm is
    compared. SiDA's truncated knowledge distillation.
    """
    exists_E = exists_LE.expand_as(scores_BTLE)
    shares = (scores_BTLE.amin(-1) >= 0) & ((scores_BTLE * exists_E).sum(-1) - 1).abs().lt(1e-2)  # of bfloat16
    teacher = torch.where(shares[..., None], scores_BTLE.clamp(min=1e-12).log(), scores_BTLE)
    teacher = teacher.float().masked_fill(~exists_E, -torch.inf)
    largest, places = teacher.topk(min(top, teacher.shape[-1]), dim=-1)
    student = logits_BTLE.float().masked_fill(~exists_E, -torch.inf).gather(-1, places)
    return _mean((student.softmax(-1) - largest.softmax(-1)).abs().sum(-1), scored_BT)


def _mean(losses_BTL: Tensor, scored_BT: Tensor) -> Tensor:
    weights = scored_BT.to(losses_BTL.dtype)
    return (losses_BTL.mean(-1) * weights).sum() / weights.sum().clamp(min=1)


LOSSES: dict[Link, Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]] = {
    "sigmoid": binary_loss,
    "softmax": soft_target_loss,
}
