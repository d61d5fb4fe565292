"""What a kind of experts module is: how it is found, called and cut into experts. Knows no traces or stores.

A kind stands for one form of module, whatever families use it. Its counterpart that computes from slots is in
`runtime/layers` under the same name. A module whose experts went into a store carries the name as `foregate_kind`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn

# N rows of a call (tokens, padding included), k top-k


class Routing(NamedTuple):
    """Hold what a router chose for the rows of one call."""

    ids: torch.Tensor
    """Expert ids [N, k] of any integer dtype, router order; -1 = no expert is loaded for this place."""
    weights: torch.Tensor
    """Weights [N, k] of any float dtype; 0 where the id is -1."""


class Widening(NamedTuple):
    """Say how a tensor of experts grows with their width."""

    parts: int
    """Equal parts of the growing axis that are repeated as a whole: 2 where gate and up stand side by side."""
    divide: bool
    """Whether it adds the hidden units up, so that its values shrink."""


class ExpertsKind(ABC):
    """Describe one form of experts module; without state, one instance serves all modules.

    `routing` reads the arguments of the module's call, or the output of `router(module)` where that gives a module.
    """

    name: ClassVar[str]
    """Key in the registry, in manifests and of the layer class in `runtime/layers`."""

    @abstractmethod
    def matches(self, module: nn.Module) -> bool:
        """Say whether a module is of this kind, from its structure: parameters, flags, form of the call."""

    def num_experts(self, module: Any) -> int:
        """Give the number of routed experts that have weights."""
        return int(module.num_experts)

    def top_k(self, module: Any) -> int | None:
        """Give the experts per row where the module itself knows; None looks for a router beside it."""
        return None

    def router(self, module: Any) -> nn.Module | None:
        """Give the module whose output has the ids, where the experts module is not called with them."""
        return None

    @abstractmethod
    def routing(self, module: Any, values: Sequence[Any]) -> Routing:
        """Read ids and weights from a call's arguments, by position, or from the router's output.

        Raises:
            ModelError: if they are not of the form that this kind expects.
        """

    @abstractmethod
    def stored(self, module: nn.Module) -> dict[str, nn.Parameter]:
        """Give the parameters that belong to single experts, by their name in the module; all others stay with it."""

    @abstractmethod
    def expert(self, tensors: Mapping[str, torch.Tensor], expert: int, num_experts: int) -> dict[str, torch.Tensor]:
        """Cut one expert out of what `stored` gave, or out of tensors of the same names and shapes.

        Returns:
            Its tensors as views, by the names and in the order of its block.

        Raises:
            ModelError: if the tensors are those of another number of experts.
        """

    def tensor_name(self, expert: int, name: str) -> str:
        """Name an expert's tensor inside the module, as the model names it where it has a name for it."""
        return f"{expert}.{name}"

    def widening(self, module: Any, name: str) -> Widening | None:
        """Say how a stored parameter grows with the experts' width; None where this kind cannot be widened."""
        return None
