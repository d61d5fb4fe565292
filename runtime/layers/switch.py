"""A layer of Switch-Transformers experts: top-1, with tokens that an expert's capacity drops."""

from __future__ import annotations

from typing import Any

import torch

from ...collect.kinds import kind_named
from .base import OffloadedLayer, Place


class SwitchLayer(OffloadedLayer):
    """Compute each expert by its own forward, on its rows; no token has two, so that the order is of no effect."""

    kind = "switch"

    def __init__(self, place: Place, module: Any, shared: Any = None) -> None:
        super().__init__(place, module, shared)
        self.module = module.emptied[0]
        self.expert = self.module.get_submodule("expert_0")

    def forward(self, hidden_TH: torch.Tensor, mask_T1E: torch.Tensor, weights_T1: torch.Tensor) -> torch.Tensor:
        """Give each token's expert output [T, H], zero for tokens dropped by capacity."""
        ids_T1 = kind_named(self.kind).routing(self.module, (hidden_TH, mask_T1E, weights_T1)).ids
        chosen_T = ids_T1[:, 0]
        out_TH = torch.zeros_like(hidden_TH)
        with self.acquire(ids_T1, {expert for expert in chosen_T.tolist() if expert >= 0}) as experts:
            for expert, tensors in experts:
                rows = torch.where(chosen_T == expert)[0]
                part = torch.func.functional_call(self.expert, tensors, (hidden_TH[rows],))
                out_TH.index_add_(0, rows, (part * weights_T1[rows]).to(hidden_TH.dtype))
        return out_TH
