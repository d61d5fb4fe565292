"""The MoE block of JetMoE: plain products of sorted rows, expert by expert, gated all at once.

Shapes: T tokens, K top-k, S = T * K rows sorted by expert, M rows of one expert, H hidden size, I expert width.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate, pairwise
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch.nn import functional

from ..blocks import TORCH_NAMES, BlockLayout
from ..gates import Gate, choose_gate
from .base import Place, outside_autograd
from .block import BlockLayer


class JetMoeLayer(BlockLayer):
    """Compute the block; `shared` is the gate."""

    kind = "jetmoe"
    STORED: ClassVar[Mapping[str, str]] = {
        "input_linear": "input_linear.weight",
        "output_linear": "output_linear.weight",
    }

    def __init__(self, place: Place, module: Any, shared: Gate) -> None:
        super().__init__(place, module, shared)
        self.gate = shared
        self.width = _width(self.layout)

    @classmethod
    def choose(cls, module: Any, layout: BlockLayout) -> Gate:
        """Choose a gate that gives an expert's rows the bits that they have among all rows."""
        activation = module.emptied[0].activation

        def apply(up_MP: torch.Tensor) -> torch.Tensor:
            gate, up = up_MP.chunk(2, dim=-1)
            return activation(gate) * up

        dtype = getattr(torch, TORCH_NAMES[layout.tensors[0].dtype])
        form = SimpleNamespace(has_gate=True, is_concatenated=True, _apply_gate=apply)
        return choose_gate(form, _width(layout), dtype)

    def forward(self, hidden_BLH: torch.Tensor) -> torch.Tensor:
        """Give the block's output, in the shape of its input."""
        hidden_TH = hidden_BLH.reshape(-1, hidden_BLH.shape[-1])
        _, token_S, weights_S, numbers_E, _ = routed = self.block.router(hidden_TH)
        args = (self.ids(routed), token_S, weights_S.detach(), numbers_E)
        out_TH = outside_autograd(self._experts, hidden_TH, *args)
        return out_TH.view(hidden_BLH.shape) + self.block.bias

    def _experts(
        self,
        hidden_TH: torch.Tensor,
        ids_TK: torch.Tensor,
        token_S: torch.Tensor,
        weights_S: torch.Tensor,
        numbers_E: list[int],
    ) -> torch.Tensor:
        x_SH = hidden_TH[token_S]
        bounds = list(pairwise(accumulate(numbers_E, initial=0)))
        act_SI = x_SH.new_empty(len(x_SH), self.width)  # rows start where they do in the resident model
        out_SH = torch.empty_like(x_SH)
        with self.acquire(ids_TK, [expert for expert, number in enumerate(numbers_E) if number]) as experts:
            for expert, tensors in experts:
                start, stop = bounds[expert]
                up_MP = functional.linear(x_SH[start:stop], tensors["input_linear"])
                act_SI[start:stop] = self.gate.rows(up_MP, start, len(x_SH))
                out_SH[start:stop] = functional.linear(act_SI[start:stop], tensors["output_linear"])
        out_SH = out_SH * weights_S[:, None]
        zeros_TH = torch.zeros(hidden_TH.shape, dtype=out_SH.dtype, device=out_SH.device)
        return zeros_TH.index_add(0, token_S, out_SH)


def _width(layout: BlockLayout) -> int:
    return next(spec for spec in layout.tensors if spec.name == "output_linear").shape[1]
