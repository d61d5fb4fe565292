"""A layer of Step-3.7 experts: stacked, with a gate of the module's own."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.nn import functional

from .loop import LoopLayer


class Step3p7Layer(LoopLayer):
    """Compute an expert through the module's own gate, whose limit differs between layers."""

    kind = "step3p7"

    def expert_rows(self, tensors: Mapping[str, torch.Tensor], x_MH: torch.Tensor) -> torch.Tensor:
        """Give up, gate and down."""
        act_MI = self.module._apply_gate(functional.linear(x_MH, tensors["gate_up_proj"]))
        return functional.linear(act_MI, tensors["down_proj"])
