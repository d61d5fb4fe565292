"""A layer of NLLB-MoE experts, computed as transformers computes it: with experts 0 and 1 alone.

Its forward takes the dispatch mask [T, E] for ids and makes a one-hot of it. So where the mask is 0 the "expert" is 0,
where it is 1 it is 1: expert 0 gets T * (E - 1) rows, most of them with weight 0, and expert 1 each first choice. Rows
are not left out here either, since a product's bits depend on how many there are. `collect/kinds/nllb.py` says what is
recorded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from .dictionary import DictionaryLayer
from .probe import random_rows


class NllbLayer(DictionaryLayer):
    """Compute what runs, each expert by its own forward, and add in the order of ids."""

    kind = "nllb"

    @classmethod
    def probe(
        cls, module: Any, block: Mapping[str, torch.Tensor], tokens: int, generator: torch.Generator
    ) -> tuple[Any, ...]:
        """Give hidden states [T, H], a mask [T, E] and weights [T, E], first and second choices taking turns."""
        first = block["fc1.weight"]
        mask_TE = torch.zeros(tokens, module.num_experts, dtype=torch.int64)
        weights_TE = torch.zeros(tokens, module.num_experts)
        weights_TE[:, :2] = torch.rand(tokens, 2, generator=generator)
        for token in range(tokens):
            mask_TE[token, token % 2] = 1
        return random_rows(tokens, first.shape[1], first.dtype, generator), mask_TE, weights_TE.to(first.dtype)

    def forward(self, hidden_TH: torch.Tensor, mask_TE: torch.Tensor, weights_TE: torch.Tensor) -> torch.Tensor:
        """Give the sum [T, H] of what the two experts make of each token."""
        recorded_T2 = self.form.routing(self.module, (hidden_TH, mask_TE, weights_TE)).ids
        runs = torch.unique(mask_TE).tolist()
        places = {expert: torch.where(mask_TE.t() == expert) for expert in runs}
        parts: dict[int, torch.Tensor] = {}
        with self.acquire(recorded_T2, runs) as experts:
            for expert, tensors in experts:
                rows = hidden_TH[None, places[expert][1]].reshape(-1, hidden_TH.shape[-1])
                parts[expert] = self.expert_rows(tensors, rows)
        out_TH = torch.zeros_like(hidden_TH)
        for expert, (choice_M, token_M) in places.items():
            part_MH = parts.pop(expert) * weights_TE[token_M, choice_M, None]
            if self.module.moe_token_dropout > 0:
                part_MH *= 1 - self.module.moe_token_dropout
            out_TH.index_add_(0, token_M, part_MH.to(hidden_TH.dtype))
        return out_TH
