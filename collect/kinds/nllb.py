"""Experts of NLLB-MoE: a module per expert with biases, called with masks of two choices.

The call is (hidden [N, H], mask [N, E] of first choices, weights [N, E]): a token's first choice is where the mask is
1, its second where there is a weight besides; what an expert's capacity drops is 0 in both. transformers 5.24 then
takes the mask for ids (its experts' forward makes a one-hot of it once more), so that experts 0 and 1 alone ever run,
whatever the router chose. What is recorded is the router's choice; what is computed, offloaded or not, is what runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from .base import Routing
from .dictionary import DictionaryKind


class NllbKind(DictionaryKind):
    """A ModuleDict `expert_0 ..` of `fc1`, `fc2` with dropout of whole tokens."""

    name = "nllb"

    def matches(self, module: nn.Module) -> bool:
        """Say whether the module is a dictionary of experts with dropout of tokens."""
        return (
            isinstance(module, nn.ModuleDict)
            and hasattr(module, "num_experts")
            and hasattr(module, "moe_token_dropout")
        )

    def top_k(self, module: Any) -> int:
        """Give 2: the router has a first and a second choice."""
        return 2

    def routing(self, module: Any, values: Sequence[Any]) -> Routing:
        """Read the first choice from the mask and the second from what is left of the weights."""
        mask_NE, weights_NE = values[1].detach().bool(), values[2].detach()
        first_N = mask_NE.to(torch.int8).argmax(dim=-1)
        rest_NE = weights_NE.masked_fill(mask_NE, 0.0)
        second_N = rest_NE.argmax(dim=-1)
        kept_N2 = torch.stack([mask_NE.any(dim=-1), rest_NE.any(dim=-1)], dim=1)
        ids_N2 = torch.stack([first_N, second_N], dim=1)
        weights_N2 = weights_NE.gather(1, ids_N2)
        return Routing(torch.where(kept_N2, ids_N2, -1), torch.where(kept_N2, weights_N2, 0.0))
