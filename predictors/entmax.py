"""Entmax-1.5 (Peters, Niculae and Martins 2019): attention weights between softmax and sparsemax, and their choice.

It is the alpha-entmax of alpha = 1.5, computed exactly by sorting: (z / 2 - tau)^2 where that is above tau. Like
sparsemax it gives exact zeros, but fewer, and its gradient fades out towards them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..collect.errors import SettingError
from .sparsemax import sparsemax

AttentionWeights = Literal["sparsemax", "entmax15", "softmax"]


def _solve(scores: Tensor) -> Tensor:
    """Give max(0, z / 2 - tau)^2, tau being such that the last dimension sums to 1."""
    halves = (scores - scores.amax(-1, keepdim=True)) / 2
    # tau is -1 at least, so that nothing below -1 counts; cut off there, masked scores cost the sums no digits
    halves = halves.clamp(min=-1)
    ordered = torch.sort(halves, dim=-1, descending=True).values
    ranks = torch.arange(1, scores.shape[-1] + 1, device=scores.device, dtype=scores.dtype)
    means = ordered.cumsum(-1) / ranks
    spreads = (ordered.square().cumsum(-1) - ranks * means.square()).clamp(min=0)
    # sum over the r largest of (z - tau)^2 = 1, solved for tau: the mean less the root of what the spread leaves of 1
    taus = means - ((1 - spreads) / ranks).clamp(min=0).sqrt()
    size = (taus <= ordered).sum(-1, keepdim=True)  # a prefix: the support
    return (halves - taus.gather(-1, size - 1)).clamp(min=0).square()


class _Entmax15(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor) -> Tensor:
        weights = _solve(scores)
        ctx.save_for_backward(weights.sqrt())
        return weights

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        (roots,) = ctx.saved_tensors  # the slope of a weight by its own score, tau held
        inside = grads[0] * roots
        return inside - roots * (inside.sum(-1, keepdim=True) / roots.sum(-1, keepdim=True))


def entmax15(scores: Tensor) -> Tensor:
    """Give weights that sum to 1 over the last dimension; masked entries get 0 unless all are."""
    if torch.compiler.is_exporting():
        return _solve(scores)
    weights = _Entmax15.apply(scores)
    assert isinstance(weights, Tensor)
    return weights


def softmax(scores: Tensor) -> Tensor:
    """Give the weights that are nowhere 0, except where masked."""
    return torch.softmax(scores, dim=-1)


ATTENTION_WEIGHTS: dict[AttentionWeights, Callable[[Tensor], Tensor]] = {
    "sparsemax": sparsemax,
    "entmax15": entmax15,
    "softmax": softmax,
}
assert set(ATTENTION_WEIGHTS) == set(get_args(AttentionWeights))


def check_attention_weights(name: str) -> None:
    """Refuse what is no way to weigh.

    Raises:
        SettingError: if there is no such function.
    """
    if name not in ATTENTION_WEIGHTS:
        raise SettingError(f"attention_weights must be one of {', '.join(ATTENTION_WEIGHTS)}, got {name!r}.")
