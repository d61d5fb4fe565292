"""Layers whose resident module loops over its experts in ascending order and adds each one's rows to the sum.

Such a loop rounds after every expert, so that the parts of an event wait until all are there and are then added in the
loop's order. Rows of an expert come in the loop's order too: by place among a token's choices, then by token.
Shapes: T tokens, K top-k, M rows of one expert, H hidden size.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import torch

from ...collect.kinds import kind_named
from .base import OffloadedLayer, Place
from .probe import random_rows


class LoopLayer(OffloadedLayer):
    """Loop over experts in the order of arrival, add in the order of their ids."""

    def __init__(self, place: Place, module: Any, shared: Any = None) -> None:
        super().__init__(place, module, shared)
        self.module: Any = module.emptied[0]
        self.form = kind_named(self.kind)

    @classmethod
    def probe(
        cls, module: Any, block: Mapping[str, torch.Tensor], tokens: int, generator: torch.Generator
    ) -> tuple[Any, ...]:
        """Give hidden states [T, H], ids [T, 2] and weights [T, 2]; the first matrix has H columns."""
        first = next(iter(block.values()))
        ids_T2 = torch.stack([torch.randperm(2, generator=generator) for _ in range(tokens)])
        weights_T2 = torch.rand(tokens, 2, generator=generator).to(first.dtype)
        return random_rows(tokens, first.shape[1], first.dtype, generator), ids_T2, weights_T2

    @abstractmethod
    def expert_rows(self, tensors: Mapping[str, torch.Tensor], x_MH: torch.Tensor) -> torch.Tensor:
        """Compute one expert on its rows [M, H], before weights, as the resident module does."""

    def without_weights(self, x_MH: torch.Tensor) -> torch.Tensor:
        """Compute an expert that needs nothing loaded, where the family has such."""
        raise AssertionError(f"{self.kind} stores all of its experts")

    def forward(self, hidden: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
        """Give the weighted sum of each token's experts, in the shape of the hidden states [.., H]."""
        hidden_TH = hidden.reshape(-1, hidden.shape[-1])
        recorded_TK = self.form.routing(self.module, (hidden_TH, ids_TK, weights_TK)).ids
        places = {expert: torch.where(ids_TK.t() == expert) for expert in torch.unique(ids_TK).tolist()}
        loaded = {expert for expert in torch.unique(recorded_TK).tolist() if expert >= 0}
        parts: dict[int, torch.Tensor] = {}
        with self.acquire(recorded_TK, loaded) as experts:
            for expert, tensors in experts:
                parts[expert] = self.expert_rows(tensors, hidden_TH[places[expert][1]])
        out_TH = torch.zeros_like(hidden_TH)
        for expert, (choice_M, token_M) in places.items():
            part_MH = parts.pop(expert) if expert in loaded else self.without_weights(hidden_TH[token_M])
            part_MH = part_MH * weights_TK[token_M, choice_M, None]
            out_TH.index_add_(0, token_M, part_MH.to(out_TH.dtype))
        return out_TH.view(hidden.shape)
