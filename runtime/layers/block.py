"""Layers whose module is the whole MoE block, router included: its experts are never called with ids.

Router, shared expert and what else is dense are the block's own modules and run as in the resident model, gradients
included; only the experts are computed from slots.
"""

from __future__ import annotations

from typing import Any

import torch

from ...collect.kinds import kind_named
from .base import OffloadedLayer, Place


class BlockLayer(OffloadedLayer):
    """Compute a block; sub-classes give `forward`, which calls `run_experts` of what they bring."""

    def __init__(self, place: Place, module: Any, shared: Any = None) -> None:
        super().__init__(place, module, shared)
        self.block: Any = module
        self.emptied: Any = module.emptied[0]
        self.form = kind_named(self.kind)

    def run(self, *args: Any) -> Any:
        """Compute the block, in which only experts are outside of autograd."""
        return self.forward(*args)

    def ids(self, routed: tuple[Any, ...]) -> torch.Tensor:
        """Read the ids [T, K] from the router's output."""
        return self.form.routing(self.block, routed).ids
