"""A layer behind transformers' experts interface, with the bits of transformers' grouped_mm.

Shapes: T tokens, K top-k, S = T * K rows sorted by expert, M rows of one expert, H hidden size, E experts.
The permutation, the group sizes and the order in which a token's experts are summed are those of the resident model.
The module stays where it is, without its parameters: the interface calls a function with it.
"""

from __future__ import annotations

from itertools import groupby, pairwise
from typing import Any, Self

import torch
from torch import nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward

from ...collect.kinds import kind_named
from ..blocks import TORCH_NAMES, BlockLayout
from ..kernels import Kernel, choose_kernel, expert_rows
from .base import OffloadedLayer, Place, drop_parameters

IMPLEMENTATION = "foregate"


class FusedLayer(OffloadedLayer):
    """Compute a layer behind transformers' experts interface; `shared` is the expert kernel."""

    kind = "fused"

    def __init__(self, place: Place, module: Any, shared: Kernel) -> None:
        super().__init__(place, module, shared)
        self.kernel = shared
        down = next(spec for spec in self.layout.tensors if spec.name == "down_proj")
        self.width = down.shape[1 if module.is_transposed else 0]
        self.dtype: torch.dtype = getattr(torch, TORCH_NAMES[down.dtype])

    @classmethod
    def empty(cls, module: nn.Module) -> nn.Module:
        """Leave the module without its parameters."""
        drop_parameters(module, kind_named(cls.kind).stored(module))
        module._is_hf_initialized = True  # type: ignore[assignment]  # its initialisation would look for them
        return module

    @classmethod
    def make_exact(cls, module: Any) -> None:
        """Choose grouped_mm."""
        module.config._experts_implementation = "grouped_mm"

    @classmethod
    def prepare(cls, module: Any, layout: BlockLayout) -> Kernel:
        """Choose the expert kernel."""
        return choose_kernel(module, layout)

    @classmethod
    def attach(cls, module: Any, place: Place, shared: Kernel) -> Self:
        """Let the interface call `fused_forward` for the module."""
        layer = super().attach(module, place, shared)
        module.config._experts_implementation = IMPLEMENTATION
        return layer

    def forward(
        self, hidden_TH: torch.Tensor, module: Any, ids_TK: torch.Tensor, weights_TK: torch.Tensor
    ) -> torch.Tensor:
        """Give the weighted sum [T, H] of each token's experts, as transformers' grouped_mm does."""
        num_tokens, top_k = ids_TK.shape
        if not num_tokens:
            return torch.zeros_like(hidden_TH)
        ids_S, perm = torch.sort(ids_TK.reshape(-1))
        hidden_SH = hidden_TH[perm // top_k].to(self.dtype)
        sample_weights_S = weights_TK.reshape(-1)[perm]
        groups = _groups(ids_S)
        out_SH = torch.empty(len(ids_S), self.width, dtype=self.dtype, device=hidden_TH.device)
        chosen_TK = kind_named(self.kind).routing(module, (hidden_TH, ids_TK, weights_TK)).ids
        with self.acquire(chosen_TK, groups) as experts:
            for expert, tensors in experts:
                rows = groups[expert]
                out_SH[rows] = expert_rows(module, tensors, hidden_SH, rows, self.kernel)
        if module.has_post_expert_norm:
            out_SH = module.post_expert_norm(out_SH)
        weighted_SH = out_SH * sample_weights_S.unsqueeze(-1)
        inverse = torch.empty_like(perm)
        inverse[perm] = torch.arange(perm.size(0), device=perm.device)
        summed_TH = weighted_SH[inverse].view(num_tokens, top_k, -1).sum(dim=1)
        return summed_TH.to(hidden_TH.dtype)


def fused_forward(module: Any, hidden_TH: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
    """Compute a fused experts module from slots: the function that transformers' experts interface calls."""
    layer = getattr(module, "foregate", None)
    if layer is None:  # of a part that text does not pass, with the config of one that it does
        return grouped_mm_experts_forward(module, hidden_TH, ids_TK, weights_TK)
    return layer.run(hidden_TH, module, ids_TK, weights_TK)


def _groups(ids_S: torch.Tensor) -> dict[int, slice]:
    """Map each expert to its rows, from ids in ascending order."""
    bounds, experts = [0], []
    for expert, run in groupby(ids_S.tolist()):
        experts.append(expert)
        bounds.append(bounds[-1] + sum(1 for _ in run))
    return {expert: slice(a, b) for expert, (a, b) in zip(experts, pairwise(bounds), strict=True)}


ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, fused_forward)
