"""Sparsemax (Martins and Astudillo 2016): the projection onto the probability simplex, as attention weights.

Unlike softmax it gives exact zeros, so that a token attends to the few others that decide its experts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

MASKED = -1e9  # score of what may not be attended to; finite, so that a row without any candidate stays finite


def _project(scores: Tensor) -> Tensor:
    """Project the last dimension onto the simplex: max(0, z - tau), tau being such that the row sums to 1."""
    shifted = scores - scores.amax(-1, keepdim=True)
    ordered = torch.sort(shifted, dim=-1, descending=True).values
    ranks = torch.arange(1, scores.shape[-1] + 1, device=scores.device, dtype=scores.dtype)
    inside = (1 + ranks * ordered > ordered.cumsum(-1)).to(scores.dtype)  # a prefix: the support
    tau = ((ordered * inside).sum(-1, keepdim=True) - 1) / inside.sum(-1, keepdim=True)
    return (shifted - tau).clamp(min=0)


class _Sparsemax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor) -> Tensor:
        weights = _project(scores)
        ctx.save_for_backward(weights > 0)
        return weights

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        (support,) = ctx.saved_tensors
        inside = grads[0] * support  # the Jacobian is the centering of the support
        return (inside - inside.sum(-1, keepdim=True) / support.sum(-1, keepdim=True)) * support


def sparsemax(scores: Tensor) -> Tensor:
    """Give weights that sum to 1 over the last dimension; entries at `MASKED` get 0 unless all are."""
    if torch.compiler.is_exporting():
        return _project(scores)
    weights = _Sparsemax.apply(scores)
    assert isinstance(weights, Tensor)
    return weights
