"""Experts that are modules of their own in a dictionary: what Switch Transformers and NLLB-MoE share.

Knows names of parameters; how such experts are called differs by family.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from .base import ExpertsKind

PREFIX = "expert_"


class DictionaryKind(ExpertsKind):
    """A ModuleDict `expert_0 ..`; an expert's tensors have the names that its module gives them."""

    def stored(self, module: nn.Module) -> dict[str, nn.Parameter]:
        """Give all parameters, expert by expert."""
        return dict(module.named_parameters())

    def expert(self, tensors: Mapping[str, torch.Tensor], expert: int, num_experts: int) -> dict[str, torch.Tensor]:
        """Give the parameters of one expert module, without its prefix."""
        prefix = f"{PREFIX}{expert}."
        return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}

    def tensor_name(self, expert: int, name: str) -> str:
        """Name it as the model does: expert_3.wi.weight."""
        return f"{PREFIX}{expert}.{name}"
