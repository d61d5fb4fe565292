"""Reuse: how much the tokens after this one will use each expert, as a second head of a token-horizon network.

The head's target is the discounted use sum over j >= 1 of discount^(j - 1) used[t + j] (what the eviction policy
`predicted` ranks by, smallest first), as shares of each layer's total. Knows tensors; knows no cache.
"""

# L MoE layers, E experts, X = L*E, H hidden, D token embedding, R features of past routing

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ..collect.errors import SettingError

NEGLIGIBLE = 0.01


def check_discount(discount: float) -> None:
    """Refuse what is no discount.

    Raises:
        SettingError: if it does not lie in [0, 1); 0 means no reuse head.
    """
    if not 0 <= discount < 1:
        raise SettingError(f"discount must lie in [0, 1), 0 for no reuse head, got {discount}.")


def horizon_of(discount: float) -> int:
    """Give after how many tokens uses count less than `NEGLIGIBLE` of the next token's."""
    return math.ceil(math.log(NEGLIGIBLE) / math.log(discount)) if discount else 0


class ReuseHead(nn.Module):
    """Give reuse logits [..., L, E] from the trunk, the token, past routing and what the routing head says.

    It starts at popularity and the frequencies of past routing.
    """

    def __init__(self, hidden: int, embedding: int, features: int, shape: tuple[int, int]) -> None:
        super().__init__()
        self.shape = shape
        entries = shape[0] * shape[1]
        self.norm = nn.LayerNorm(hidden)
        self.hidden = nn.Linear(hidden, hidden)
        self.heads = nn.Linear(hidden, entries)
        self.token_skip = nn.Linear(embedding, entries, bias=False)
        self.history_skip = nn.Parameter(torch.full((features, *shape), 0.1))
        self.routing_skip = nn.Parameter(torch.zeros(shape))
        nn.init.zeros_(self.token_skip.weight)

    @torch.no_grad()
    def warm_start(self, popularity_LE: Tensor) -> None:
        """Start at popularity."""
        self.heads.weight.mul_(0.1)
        self.heads.bias.copy_(torch.log(popularity_LE.clamp(min=1e-4)).flatten())

    def forward(self, trunk: Tensor, token: Tensor, features: Tensor, routing: Tensor) -> Tensor:
        """Give logits from trunk [..., H], token [..., D], features [..., R, L, E] and routing logits [..., L, E]."""
        hidden = nn.functional.gelu(self.hidden(self.norm(trunk)))
        logits = (self.heads(hidden) + self.token_skip(token)).unflatten(-1, self.shape)
        log_routing = -nn.functional.softplus(-routing.detach())  # of logsigmoid, ONNX makes log(0) below -18
        return logits + (features * self.history_skip).sum(-3) + log_routing * self.routing_skip
