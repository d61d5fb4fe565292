"""The MoE block of JetMoE: experts get sorted rows and their numbers, so that the block with its router is the module.

The router gives (order [S], tokens [S], weights [S], numbers of rows [E], logits), S = N * k rows sorted by expert.
`input_linear.weight` is [E, 2I, H], `output_linear.weight` [E, H, I]; the block's `bias` is no expert's.
JetMoE has experts in its attention too (query and output projections, a router of their own). They stay dense: of
JetMoE-8B they are a fifth of all experts' bytes, a quarter of a feed-forward expert's size each, and are needed at two
places of a block, so that one slot size and one event per layer would not fit them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..errors import ModelError
from .base import ExpertsKind, Routing, Widening
from .fused import slices

NAMES = ("input_linear", "output_linear")


class JetMoeKind(ExpertsKind):
    """A block of a router, a bias, and two stacks of linear layers."""

    name = "jetmoe"

    def matches(self, module: nn.Module) -> bool:
        """Say whether the module has a router and two stacks, and is no attention, which maps and reduces."""
        return (
            hasattr(getattr(module, "router", None), "top_k")
            and not hasattr(module, "map")
            and all(hasattr(getattr(module, name, None), "num_experts") for name in NAMES)
            and all(f"{name}.weight" in dict(module.named_parameters()) for name in NAMES)
        )

    def num_experts(self, module: Any) -> int:
        """Give the router's."""
        return int(module.router.num_experts)

    def top_k(self, module: Any) -> int:
        """Give the router's."""
        return int(module.router.top_k)

    def router(self, module: Any) -> nn.Module:
        """Give the block's router."""
        return module.router

    def routing(self, module: Any, values: Sequence[Any]) -> Routing:
        """Bring the sorted rows back into the order of tokens."""
        if len(values) != 5 or len(values[3]) != self.num_experts(module):
            raise ModelError(
                f"The router of {type(module).__name__} gave {len(values)} values, expected order, tokens, weights, "
                "numbers of rows and logits; this version of the family cannot be recorded."
            )
        order_S, _, weights_S, numbers_E, _ = values
        sorted_S = torch.repeat_interleave(torch.tensor(numbers_E, device=order_S.device))
        ids_S = torch.empty_like(order_S).index_copy_(0, order_S, sorted_S)
        unsorted_S = torch.empty_like(weights_S).index_copy_(0, order_S, weights_S.detach())
        return Routing(ids_S.view(-1, self.top_k(module)), unsorted_S.view(-1, self.top_k(module)))

    def stored(self, module: nn.Module) -> dict[str, nn.Parameter]:
        """Give the two stacks."""
        found = dict(module.named_parameters())
        return {f"{name}.weight": found[f"{name}.weight"] for name in NAMES if f"{name}.weight" in found}

    def expert(self, tensors: Mapping[str, torch.Tensor], expert: int, num_experts: int) -> dict[str, torch.Tensor]:
        """Give a slice of each stack, as input_linear and output_linear."""
        parts = {name.removesuffix(".weight"): tensor for name, tensor in tensors.items()}
        return slices(parts, expert, num_experts)

    def widening(self, module: Any, name: str) -> Widening:
        """Gate and up stand beside each other."""
        down = name == "output_linear.weight"
        return Widening(parts=1 if down else 2, divide=down)
