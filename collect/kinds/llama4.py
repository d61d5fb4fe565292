"""The MoE block of Llama 4: experts that are never called with ids, so that the block with its router is the module.

The router gives (scores [N, E], logits [N, E]); every expert gets every row, times its score, which is 0 where it was
not chosen. Parameters are transposed: `gate_up_proj` [E, H, 2I], `down_proj` [E, I, H] in the child `experts`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..errors import ModelError
from .base import ExpertsKind, Routing, Widening
from .fused import slices
from .step3p7 import call_length

NAMES = ("gate_up_proj", "down_proj")


class Llama4Kind(ExpertsKind):
    """A block of a router, a shared expert, and experts that see all rows."""

    name = "llama4"

    def matches(self, module: nn.Module) -> bool:
        """Say whether the module has a router beside stacked experts that take hidden states only."""
        experts = getattr(module, "experts", None)
        return (
            isinstance(experts, nn.Module)
            and hasattr(getattr(module, "router", None), "top_k")
            and hasattr(module, "shared_expert")
            and all(name in experts._parameters for name in NAMES)
            and call_length(experts) == 1
        )

    def top_k(self, module: Any) -> int:
        """Give the router's."""
        return int(module.router.top_k)

    def router(self, module: Any) -> nn.Module:
        """Give the block's router."""
        return module.router

    def routing(self, module: Any, values: Sequence[Any]) -> Routing:
        """Repeat the router's top-k on its logits; scores are 0 but for those."""
        if len(values) != 2 or values[0].shape != values[1].shape:
            raise ModelError(
                f"The router of {type(module).__name__} gave {len(values)} values, expected scores and logits of one "
                "shape; this version of the family cannot be recorded."
            )
        scores_NE, logits_NE = (value.detach() for value in values)
        ids_NK = torch.topk(logits_NE, self.top_k(module), dim=1).indices
        return Routing(ids_NK, scores_NE.gather(1, ids_NK))

    def stored(self, module: nn.Module) -> dict[str, nn.Parameter]:
        """Give the two stacks."""
        found = dict(module.named_parameters())
        return {f"experts.{name}": found[f"experts.{name}"] for name in NAMES if f"experts.{name}" in found}

    def expert(self, tensors: Mapping[str, torch.Tensor], expert: int, num_experts: int) -> dict[str, torch.Tensor]:
        """Give a slice of each stack."""
        parts = {name.rpartition(".")[2]: tensor for name, tensor in tensors.items()}
        return slices(parts, expert, num_experts)

    def widening(self, module: Any, name: str) -> Widening:
        """Gate and up stand beside each other."""
        down = name == "experts.down_proj"
        return Widening(parts=1 if down else 2, divide=down)
