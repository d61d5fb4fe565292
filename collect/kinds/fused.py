"""Experts behind transformers' experts interface: 3-D parameters [E, ...], called with hidden states, ids and weights.

Shapes: gate_up_proj [E, 2I, H] and down_proj [E, H, I], or transposed, interleaved, with biases, without a gate; what
holds of them is said by flags of the module. Example: Qwen3-MoE, Mixtral, DeepSeek-V3, gpt-oss.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..errors import ModelError
from .base import ExpertsKind, Routing, Widening

FLAGS = ("has_gate", "has_bias", "is_transposed", "_apply_gate")


class FusedKind(ExpertsKind):
    """Experts stacked along the first axis of each parameter."""

    name = "fused"

    def matches(self, module: nn.Module) -> bool:
        """Say whether the module has the interface's flags."""
        return hasattr(module, "num_experts") and all(hasattr(module, flag) for flag in FLAGS)

    def routing(self, module: Any, values: Sequence[Any]) -> Routing:
        """Read (hidden [N, H], ids [N, k], weights [N, k])."""
        return ids_and_weights(module, values)

    def stored(self, module: nn.Module) -> dict[str, nn.Parameter]:
        """Give the module's own parameters; those of its children are no experts'."""
        return dict(module.named_parameters(recurse=False))

    def expert(self, tensors: Mapping[str, torch.Tensor], expert: int, num_experts: int) -> dict[str, torch.Tensor]:
        """Give a slice of each parameter."""
        return slices(tensors, expert, num_experts)

    def widening(self, module: Any, name: str) -> Widening:
        """gate0 up0 gate1 up1 .. may be repeated as one part; gate0 gate1 .. up0 up1 .. are two."""
        beside = name.startswith("gate_up") and getattr(module, "is_concatenated", True)
        return Widening(parts=2 if beside else 1, divide=name.startswith("down"))


def ids_and_weights(module: nn.Module, values: Sequence[Any]) -> Routing:
    """Read the common form of a call: anything, ids [.., k], weights with as many numbers.

    Raises:
        ModelError: if the call has another form.
    """
    if len(values) < 3:
        raise ModelError(
            f"{type(module).__name__} was called with {len(values)} arguments, expected hidden states, expert ids and "
            "weights; this family cannot be recorded."
        )
    ids, weights = values[1].detach(), values[2].detach()
    ids_NK = ids.reshape(-1, ids.shape[-1])
    return Routing(ids_NK, weights.reshape(ids_NK.shape[0], -1))


def slices(tensors: Mapping[str, torch.Tensor], expert: int, num_experts: int) -> dict[str, torch.Tensor]:
    """Give one expert's slice of each stacked tensor, as views.

    Raises:
        ModelError: if a tensor holds another number of experts.
    """
    for name, tensor in tensors.items():
        if len(tensor) != num_experts:
            raise ModelError(
                f"Parameter {name} holds {len(tensor)} experts where the layer has {num_experts}; this family cannot "
                "be packed."
            )
    return {name: tensor[expert] for name, tensor in tensors.items()}
