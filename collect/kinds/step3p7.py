"""Experts of Step-3.7: stacked like those of the experts interface and called like them, but not on the interface.

`gate_up_proj` [E, 2I, H], `down_proj` [E, H, I], a gate of the module's own, and none of the interface's flags.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from .base import ExpertsKind, Routing, Widening
from .fused import ids_and_weights, slices

NAMES = ("gate_up_proj", "down_proj")


class Step3p7Kind(ExpertsKind):
    """Stacked experts that loop over themselves."""

    name = "step3p7"

    def matches(self, module: nn.Module) -> bool:
        """Say whether the module has stacked experts and a gate, but no flags of the interface."""
        return (
            hasattr(module, "num_experts")
            and hasattr(module, "_apply_gate")
            and not hasattr(module, "has_gate")
            and all(name in module._parameters for name in NAMES)
            and call_length(module) == 3
        )

    def routing(self, module: Any, values: Sequence[Any]) -> Routing:
        """Read (hidden [N, H], ids [N, k], weights [N, k])."""
        return ids_and_weights(module, values)

    def stored(self, module: nn.Module) -> dict[str, nn.Parameter]:
        """Give the two stacks."""
        return own_parameters(module, NAMES)

    def expert(self, tensors: Mapping[str, torch.Tensor], expert: int, num_experts: int) -> dict[str, torch.Tensor]:
        """Give a slice of each stack."""
        return slices(tensors, expert, num_experts)

    def widening(self, module: Any, name: str) -> Widening:
        """Gate and up stand beside each other."""
        return Widening(parts=1 if name == "down_proj" else 2, divide=name == "down_proj")


def own_parameters(module: nn.Module, names: Sequence[str]) -> dict[str, nn.Parameter]:
    """Give those of the named parameters that a module still has."""
    found = dict(module.named_parameters(recurse=False))
    return {name: found[name] for name in names if name in found}


def call_length(module: nn.Module) -> int:
    """Give the number of arguments that a module's forward takes, itself aside."""
    return len(inspect.signature(type(module).forward).parameters) - 1
