"""Experts of Switch Transformers: a module per expert, called with a dispatch mask.

The call is (hidden [N, H], mask [N, 1, E], weights [N, 1]); a row of zeros is a token dropped by the expert's capacity.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from .base import Routing, Widening
from .dictionary import DictionaryKind


class SwitchKind(DictionaryKind):
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

    def widening(self, module: Any, name: str) -> Widening:
        """Widen `wi` by rows and `wo` by columns."""
        return Widening(parts=1, divide=name.endswith("wo.weight"))
