"""A layer of DBRX experts: one function of the module's computes any expert from its three matrices."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from .loop import LoopLayer


class DbrxLayer(LoopLayer):
    """Hand an expert's matrices to the module's own function."""

    kind = "dbrx"

    def expert_rows(self, tensors: Mapping[str, torch.Tensor], x_MH: torch.Tensor) -> torch.Tensor:
        """Give gate, up and down."""
        return self.module.mlp(x_MH, tensors["w1"], tensors["v1"], tensors["w2"])
