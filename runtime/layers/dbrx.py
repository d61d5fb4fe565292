"""A layer of DBRX experts: one function of the module's computes any expert from its three matrices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from .loop import LoopLayer


class DbrxLayer(LoopLayer):
    """Hand an expert's matrices to the module's own function."""

    kind = "dbrx"

    @classmethod
    def joined(cls, module: Any, blocks: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """Put experts below one another."""
        return {f"mlp.{name}": torch.cat([block[name] for block in blocks]) for name in blocks[0]}

    @classmethod
    def probe(
        cls, module: Any, block: Mapping[str, torch.Tensor], tokens: int, generator: torch.Generator
    ) -> tuple[Any, ...]:
        """Give hidden states [1, T, H]."""
        hidden_TH, *others = super().probe(module, block, tokens, generator)
        return hidden_TH[None], *others

    def expert_rows(self, tensors: Mapping[str, torch.Tensor], x_MH: torch.Tensor) -> torch.Tensor:
        """Give gate, up and down."""
        return self.module.mlp(x_MH, tensors["w1"], tensors["v1"], tensors["w2"])
