"""Experts of DBRX: 2-D parameters [E * F, H] in a child `mlp`, called with hidden states [B, S, H], ids and weights.

F is an expert's width; its rows F * e .. F * (e + 1) of `w1`, `v1` and `w2` belong to expert e.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..errors import ModelError
from .base import ExpertsKind, Routing
from .fused import ids_and_weights

NAMES = ("w1", "v1", "w2")


class DbrxKind(ExpertsKind):
    """Experts below one another in three matrices of a child."""

    name = "dbrx"

    def matches(self, module: nn.Module) -> bool:
        """Say whether the module has experts and a child with the three matrices."""
        child = getattr(module, "mlp", None)
        return hasattr(module, "num_experts") and all(getattr(child, name, None) is not None for name in NAMES)

    def routing(self, module: Any, values: Sequence[Any]) -> Routing:
        """Read (hidden [B, S, H], ids [N, k], weights [N, k])."""
        return ids_and_weights(module, values)

    def stored(self, module: nn.Module) -> dict[str, nn.Parameter]:
        """Give the three matrices."""
        found = dict(module.named_parameters())
        return {f"mlp.{name}": found[f"mlp.{name}"] for name in NAMES if f"mlp.{name}" in found}

    def expert(self, tensors: Mapping[str, torch.Tensor], expert: int, num_experts: int) -> dict[str, torch.Tensor]:
        """Give F rows of each matrix."""
        for name, tensor in tensors.items():
            if len(tensor) % num_experts:
                raise ModelError(
                    f"Parameter {name} has {len(tensor)} rows, which are not those of {num_experts} experts; this "
                    "family cannot be packed."
                )
        parts = {name.rpartition(".")[2]: tensor for name, tensor in tensors.items()}
        return {name: tensor.view(num_experts, -1, tensor.shape[-1])[expert] for name, tensor in parts.items()}
