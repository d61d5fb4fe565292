"""A layer of Switch-Transformers experts: top-1, with tokens that an expert's capacity drops."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from .dictionary import DictionaryLayer
from .probe import random_rows


class SwitchLayer(DictionaryLayer):
    """Compute each expert by its own forward, on its rows; no token has two, so that the order is of no effect."""

    kind = "switch"

    @classmethod
    def probe(
        cls, module: Any, block: Mapping[str, torch.Tensor], tokens: int, generator: torch.Generator
    ) -> tuple[Any, ...]:
        """Give hidden states [T, H], a mask [T, 1, E] and weights [T, 1]; the last of several tokens is dropped."""
        first = block["wi.weight"]
        mask_T1E = torch.zeros(tokens, 1, module.num_experts, dtype=torch.int64)
        for token in range(tokens - (tokens > 1)):
            mask_T1E[token, 0, token % 2] = 1
        weights_T1 = torch.rand(tokens, 1, generator=generator).to(first.dtype)
        return random_rows(tokens, first.shape[1], first.dtype, generator), mask_T1E, weights_T1

    def forward(self, hidden_TH: torch.Tensor, mask_T1E: torch.Tensor, weights_T1: torch.Tensor) -> torch.Tensor:
        """Give each token's expert output [T, H], zero for tokens dropped by capacity."""
        ids_T1 = self.form.routing(self.module, (hidden_TH, mask_T1E, weights_T1)).ids
        chosen_T = ids_T1[:, 0]
        out_TH = torch.zeros_like(hidden_TH)
        with self.acquire(ids_T1, {expert for expert in chosen_T.tolist() if expert >= 0}) as experts:
            for expert, tensors in experts:
                rows = torch.where(chosen_T == expert)[0]
                part = self.expert_rows(tensors, hidden_TH[rows])
                out_TH.index_add_(0, rows, (part * weights_T1[rows]).to(hidden_TH.dtype))
        return out_TH
