"""Losses between logits and the experts that tokens used. Knows tensors; knows no predictor or trace."""

# B batch, T tokens, L MoE layers, E experts

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from ..predictors.network import ABSENT, Link


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


def _mean(losses_BTL: Tensor, scored_BT: Tensor) -> Tensor:
    weights = scored_BT.to(losses_BTL.dtype)
    return (losses_BTL.mean(-1) * weights).sum() / weights.sum().clamp(min=1)


LOSSES: dict[Link, Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]] = {
    "sigmoid": binary_loss,
    "softmax": soft_target_loss,
}
