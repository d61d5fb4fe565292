"""Layers whose module is the whole MoE block, router included: its experts are never called with ids.

Router, shared expert and what else is dense are the block's own modules and run as in the resident model, gradients
included; only the experts are computed from slots.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch

from ...collect.kinds import kind_named
from .base import OffloadedLayer, Place
from .probe import random_rows


class BlockLayer(OffloadedLayer):
    """Compute a block; in a probe its router chooses, so that one random expert stands for all."""

    PROBED = 1
    STORED: ClassVar[Mapping[str, str]]
    """Name in a block -> name of the stack in the module."""
    TRANSPOSED: ClassVar[bool] = False
    """Whether a matrix has its inputs along the first axis."""

    def __init__(self, place: Place, module: Any, shared: Any = None) -> None:
        super().__init__(place, module, shared)
        self.block: Any = module
        self.emptied: Any = module.emptied[0]
        self.form = kind_named(self.kind)

    @classmethod
    def joined(cls, module: Any, blocks: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """Repeat the one expert without a copy."""
        count = kind_named(cls.kind).num_experts(module)
        return {cls.STORED[name]: tensor.expand(count, *tensor.shape) for name, tensor in blocks[0].items()}

    @classmethod
    def probe(
        cls, module: Any, block: Mapping[str, torch.Tensor], tokens: int, generator: torch.Generator
    ) -> tuple[Any, ...]:
        """Give hidden states [1, T, H]; the last matrix gives H."""
        last = [*block.values()][-1]
        width = last.shape[1] if cls.TRANSPOSED else last.shape[0]
        return (random_rows(tokens, width, last.dtype, generator)[None],)

    def run(self, *args: Any) -> Any:
        """Compute the block, in which only experts are outside of autograd."""
        return self.forward(*args)

    def ids(self, routed: tuple[Any, ...]) -> torch.Tensor:
        """Read the ids [T, K] from the router's output."""
        return self.form.routing(self.block, routed).ids
