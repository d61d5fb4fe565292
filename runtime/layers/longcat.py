"""A layer of LongCat-Flash experts: stacked, with identity experts beyond them that need nothing loaded."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.nn import functional

from .loop import LoopLayer


class LongcatLayer(LoopLayer):
    """Compute routed experts from slots and identity experts from nothing, in one ascending order of ids."""

    kind = "longcat"

    def expert_rows(self, tensors: Mapping[str, torch.Tensor], x_MH: torch.Tensor) -> torch.Tensor:
        """Give up, gate and down."""
        gate_MI, up_MI = functional.linear(x_MH, tensors["gate_up_proj"]).chunk(2, dim=-1)
        return functional.linear(self.module.act_fn(gate_MI) * up_MI, tensors["down_proj"])

    def without_weights(self, x_MH: torch.Tensor) -> torch.Tensor:
        """Give the rows themselves."""
        return self.module.identity_expert(x_MH)
