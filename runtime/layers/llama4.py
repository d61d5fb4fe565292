"""The MoE block of Llama 4: batched products over all experts, of which those that no token chose give zeros.

Shapes: T tokens, K top-k, E experts, H hidden size, I expert width, P = 2 I.
The resident block gives every expert all T rows, each times its score, 0 where it was not chosen. An expert here gets
all T rows too, since a product's bits depend on how many there are; experts that no token chose are left out, and the
sum over experts runs over all E, zeros included, as there.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, ClassVar

import torch

from ..blocks import BlockLayout
from .base import Place, outside_autograd
from .batched import BatchedKernel
from .block import BlockLayer


class Llama4Layer(BlockLayer):
    """Compute the block; `shared` is the kernel."""

    kind = "llama4"
    STORED: ClassVar[Mapping[str, str]] = {"gate_up_proj": "experts.gate_up_proj", "down_proj": "experts.down_proj"}
    TRANSPOSED = True

    def __init__(self, place: Place, module: Any, shared: BatchedKernel) -> None:
        super().__init__(place, module, shared)
        self.kernel = shared

    @classmethod
    def choose(cls, module: Any, layout: BlockLayout) -> BatchedKernel:
        """Open a kernel with the gate of the block's experts: up times the activation of gate, halves of a row."""
        act_fn = module.emptied[0].experts.act_fn

        def apply(up_MP: torch.Tensor) -> torch.Tensor:
            gate, up = up_MP.chunk(2, dim=-1)
            return up * act_fn(gate)

        gated = SimpleNamespace(has_gate=True, is_concatenated=True, _apply_gate=apply)
        return BatchedKernel(gated, layout, module.num_experts)

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Give the block's output [T, H] and the router's logits [T, E]."""
        hidden_TH = hidden.reshape(-1, hidden.shape[-1])
        scores_TE, logits_TE = routed = self.block.router(hidden_TH)
        routed_TH = outside_autograd(self._experts, hidden_TH, scores_TE.detach(), self.ids(routed))
        out_TH = self.block.shared_expert(hidden_TH)
        out_TH.add_(routed_TH)
        return out_TH, logits_TE

    def _experts(self, hidden_TH: torch.Tensor, scores_TE: torch.Tensor, ids_TK: torch.Tensor) -> torch.Tensor:
        num_tokens, num_experts = scores_TE.shape
        alone = ids_TK.shape[1] == 1  # a token's other experts give zeros: nothing to sum, and E times less memory
        out_ETH = hidden_TH.new_zeros(1 if alone else num_experts, *hidden_TH.shape)
        with self.acquire(ids_TK, torch.unique(ids_TK).tolist()) as experts:
            for expert, tensors in experts:
                x_TH = hidden_TH * scores_TE[:, expert, None]
                part_TH = self.kernel.rows(tensors, x_TH, expert * num_tokens, scores_TE.numel())
                if alone:
                    out_ETH[0].add_(part_TH.masked_fill(ids_TK != expert, 0.0))
                else:
                    out_ETH[expert] = part_TH
        return out_ETH.sum(dim=0)
