"""The experts' forward of an offloaded model: transformers' own arithmetic, expert by expert, from slots.

Shapes: T tokens, K top-k, S = T * K rows sorted by expert, M rows of one expert, H hidden size, E experts.
The permutation, the group sizes and the order in which a token's experts are summed are those of the resident model, so
that the result has its bits whatever the order in which experts arrive.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby, pairwise
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from ..collect.errors import ModelError
from .blocks import TORCH_NAMES, BlockLayout
from .engine import ExpertEngine
from .forecast import Forecast
from .kernels import Kernel, expert_rows
from .slots import SlotArena

IMPLEMENTATION = "foregate"


class Router(Protocol):
    """Hear what a layer's router chose, and give the forecast in force."""

    def routed(self, layer: int, ids: np.ndarray) -> Forecast | None:
        """Take the ids [T, K] (-1 = dropped) of a layer."""
        ...


class OffloadedLayer:
    """Serve one MoE layer from slots."""

    def __init__(self, layer: int, engine: ExpertEngine, arena: SlotArena, layout: BlockLayout, router: Router) -> None:
        self.layer, self.engine, self.arena, self.layout, self.router = layer, engine, arena, layout, router
        self.offset = engine.topology.offsets[layer]

    def acquire(self, ids: np.ndarray, groups: dict[int, Any]) -> Any:
        """Serve the experts of `groups`, whose keys are expert ids of this layer."""
        forecast = self.router.routed(self.layer, ids)
        needed = sorted(self.offset + expert for expert in groups)
        return self.engine.acquire(self.layer, needed, one_token=len(ids) == 1, forecast=forecast)

    def tensors(self, slot: int) -> dict[str, torch.Tensor]:
        """Give the expert in a slot as tensors by name."""
        return self.arena.tensors(slot, self.layout)


class FusedLayer(OffloadedLayer):
    """Compute a layer behind transformers' experts interface."""

    def __init__(self, *args: Any, kernel: Kernel, transposed: bool) -> None:
        super().__init__(*args)
        self.kernel = kernel
        down = next(spec for spec in self.layout.tensors if spec.name == "down_proj")
        self.width = down.shape[1 if transposed else 0]
        self.dtype: torch.dtype = getattr(torch, TORCH_NAMES[down.dtype])

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
        with self.acquire(ids_TK.numpy(force=True), groups) as experts:
            for flat, slot in experts:
                rows = groups[flat - self.offset]
                out_SH[rows] = expert_rows(module, self.tensors(slot), hidden_SH, rows, self.kernel)
        if module.has_post_expert_norm:
            out_SH = module.post_expert_norm(out_SH)
        weighted_SH = out_SH * sample_weights_S.unsqueeze(-1)
        inverse = torch.empty_like(perm)
        inverse[perm] = torch.arange(perm.size(0), device=perm.device)
        summed_TH = weighted_SH[inverse].view(num_tokens, top_k, -1).sum(dim=1)
        return summed_TH.to(hidden_TH.dtype)


class SwitchLayer(OffloadedLayer):
    """Compute a layer of Switch-Transformers experts; `template` is one expert module without weights."""

    def __init__(self, *args: Any, template: nn.Module) -> None:
        super().__init__(*args)
        self.template = template

    def forward(self, hidden_TH: torch.Tensor, mask_T1E: torch.Tensor, weights_T1: torch.Tensor) -> torch.Tensor:
        """Give each token's expert output [T, H], zero for tokens dropped by capacity."""
        mask_TE = mask_T1E[:, 0]
        chosen_T = torch.where(mask_TE.any(-1), mask_TE.argmax(-1), -1)
        out_TH = torch.zeros_like(hidden_TH)
        ids_T1 = chosen_T[:, None].numpy(force=True)
        groups = {expert: None for expert in torch.unique(chosen_T).tolist() if expert >= 0}
        if not groups:  # every token dropped
            self.router.routed(self.layer, ids_T1)
            return out_TH
        with self.acquire(ids_T1, groups) as experts:
            for flat, slot in experts:
                rows = torch.where(chosen_T == flat - self.offset)[0]
                part = torch.func.functional_call(self.template, self.tensors(slot), (hidden_TH[rows],))
                out_TH.index_add_(0, rows, (part * weights_T1[rows]).to(hidden_TH.dtype))
        return out_TH


class OffloadedSwitchExperts(nn.ModuleDict):
    """Stand in for Switch-Transformers experts whose weights live in a store; attach a `SwitchLayer` before use."""

    def __init__(self, num_experts: int, template: nn.Module) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.template = (template,)  # in a tuple: not a sub-module, so that its meta tensors are no parameters
        self.foregate: SwitchLayer | None = None

    def forward(self, hidden_TH: torch.Tensor, mask_T1E: torch.Tensor, weights_T1: torch.Tensor) -> torch.Tensor:
        """Compute the layer from slots."""
        assert self.foregate is not None, "attached at load"
        return _outside_autograd(self.foregate.forward, hidden_TH, mask_T1E, weights_T1)


def fused_forward(module: Any, hidden_TH: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
    """Compute a fused experts module from slots: the function that transformers' experts interface calls."""
    return _outside_autograd(module.foregate.forward, hidden_TH, module, ids_TK, weights_TK)


def _outside_autograd(forward: Callable[..., torch.Tensor], hidden_TH: torch.Tensor, *args: Any) -> torch.Tensor:
    """Compute a layer outside of autograd, which would keep slots that change behind its back.

    Parameters of the model stay as they are: whether they require gradients decides which products PyTorch takes.
    """
    with torch.no_grad():
        out_TH = forward(hidden_TH, *args)
    if torch.is_grad_enabled() and hidden_TH.requires_grad:
        out_TH.requires_grad_().register_hook(_refuse_backward)
    return out_TH


def _refuse_backward(grad: torch.Tensor) -> None:
    raise ModelError("Offloaded experts have no gradients; train the resident model and pack it afterwards.")


def _groups(ids_S: torch.Tensor) -> dict[int, slice]:
    """Map each expert to its rows, from ids in ascending order."""
    bounds, experts = [0], []
    for expert, run in groupby(ids_S.tolist()):
        experts.append(expert)
        bounds.append(bounds[-1] + sum(1 for _ in run))
    return {expert: slice(a, b) for expert, (a, b) in zip(experts, pairwise(bounds), strict=True)}


ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, fused_forward)
