"""A layer of LongCat-Flash experts: stacked, with identity experts beyond them that need nothing loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn import functional

from .loop import LoopLayer


class LongcatLayer(LoopLayer):
    """Compute routed experts from slots and identity experts from nothing, in one ascending order of ids."""

    kind = "longcat"

    @classmethod
    def probe(
        cls, module: Any, block: Mapping[str, torch.Tensor], tokens: int, generator: torch.Generator
    ) -> tuple[Any, ...]:
        """Let one choice be an identity expert, where there are any."""
        hidden_TH, ids_T2, weights_T2 = super().probe(module, block, tokens, generator)
        if module.emptied[0].zero_expert_num:
            ids_T2[::2, 1] = module.num_experts
        return hidden_TH, ids_T2, weights_T2

    def expert_rows(self, tensors: Mapping[str, torch.Tensor], x_MH: torch.Tensor) -> torch.Tensor:
        """Give up, gate and down."""
        gate_MI, up_MI = functional.linear(x_MH, tensors["gate_up_proj"]).chunk(2, dim=-1)
        return functional.linear(self.module.act_fn(gate_MI) * up_MI, tensors["down_proj"])

    def without_weights(self, x_MH: torch.Tensor) -> torch.Tensor:
        """Give the rows themselves."""
        return self.module.identity_expert(x_MH)
