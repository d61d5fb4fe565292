"""Experts of LongCat-Flash: stacked experts and, beyond them, identity experts that have no weights.

`gate_up_proj` [E + Z, 2I, H] has rows for Z identity experts that nothing reads, `down_proj` is [E, H, I]. A router's
id from E on means that the token's own hidden state is added, times its weight. Nothing is loaded for it, so it is
recorded as -1 with weight 0, and a row may have none but such ids.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from .base import ExpertsKind, Routing, Widening
from .fused import ids_and_weights, slices
from .step3p7 import own_parameters

NAMES = ("gate_up_proj", "down_proj")


class LongcatKind(ExpertsKind):
    """Stacked experts followed by identity experts."""

    name = "longcat"

    def matches(self, module: nn.Module) -> bool:
        """Say whether the module tells routed from identity experts and has weights for the routed ones."""
        return (
            hasattr(module, "num_routed_experts")
            and hasattr(module, "zero_expert_num")
            and all(module._parameters.get(name) is not None for name in NAMES)
        )

    def num_experts(self, module: Any) -> int:
        """Give the experts that have weights."""
        return int(module.num_experts if hasattr(module, "foregate_kind") else module.num_routed_experts)

    def routing(self, module: Any, values: Sequence[Any]) -> Routing:
        """Read (hidden [N, H], ids [N, k], weights [N, k]); identity experts become -1."""
        ids_NK, weights_NK = ids_and_weights(module, values)
        loaded_NK = ids_NK < self.num_experts(module)
        return Routing(torch.where(loaded_NK, ids_NK, -1), torch.where(loaded_NK, weights_NK, 0.0))

    def stored(self, module: nn.Module) -> dict[str, nn.Parameter]:
        """Give the two stacks."""
        return own_parameters(module, NAMES)

    def expert(self, tensors: Mapping[str, torch.Tensor], expert: int, num_experts: int) -> dict[str, torch.Tensor]:
        """Give a slice of each stack; rows of identity experts belong to none."""
        return slices({name: tensor[:num_experts] for name, tensor in tensors.items()}, expert, num_experts)

    def widening(self, module: Any, name: str) -> Widening:
        """Gate and up stand beside each other."""
        return Widening(parts=1 if name == "down_proj" else 2, divide=name == "down_proj")
