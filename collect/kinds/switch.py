"""Experts of Switch Transformers: a module per expert, called with a dispatch mask.

The call is (hidden [N, H], mask [N, 1, E], weights [N, 1]); a row of zeros is a token dropped by the expert's capacity.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from .base import ExpertsKind, Routing, Widening

PREFIX = "expert_"


class SwitchKind(ExpertsKind):
    """A ModuleDict `expert_0 ..` of dense `wi`, `wo`."""

    name = "switch"

    def matches(self, module: nn.Module) -> bool:
        """Say whether the module is a dictionary of experts that does not drop tokens itself."""
        return (
            isinstance(module, nn.ModuleDict)
            and hasattr(module, "num_experts")
            and not hasattr(module, "moe_token_dropout")
        )

    def top_k(self, module: Any) -> int:
        """Give 1: the mask has one expert per row."""
        return 1

    def routing(self, module: Any, values: Sequence[Any]) -> Routing:
        """Read the mask."""
        mask, weights = values[1].detach(), values[2].detach()
        mask_NE = mask.reshape(-1, mask.shape[-1])
        kept_N = mask_NE.any(dim=-1)
        ids_N = torch.where(kept_N, mask_NE.to(torch.int8).argmax(dim=-1), -1)
        weights_N = torch.where(kept_N, weights.reshape(-1), 0.0)
        return Routing(ids_N.unsqueeze(-1), weights_N.unsqueeze(-1))

    def stored(self, module: nn.Module) -> dict[str, nn.Parameter]:
        """Give all parameters, expert by expert."""
        return dict(module.named_parameters())

    def expert(self, tensors: Mapping[str, torch.Tensor], expert: int, num_experts: int) -> dict[str, torch.Tensor]:
        """Give the parameters of one expert module, without its prefix."""
        return of_expert_module(tensors, expert)

    def tensor_name(self, expert: int, name: str) -> str:
        """Name it as the model does: expert_3.wi.weight."""
        return f"{PREFIX}{expert}.{name}"

    def widening(self, module: Any, name: str) -> Widening:
        """Widen `wi` by rows and `wo` by columns."""
        return Widening(parts=1, divide=name.endswith("wo.weight"))


def of_expert_module(tensors: Mapping[str, torch.Tensor], expert: int) -> dict[str, torch.Tensor]:
    """Pick the tensors of one expert out of those of a dictionary of experts, without their prefix."""
    prefix = f"{PREFIX}{expert}."
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
