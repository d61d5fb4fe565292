"""The MoE block of Llama 4: batched products over all experts, of which those that no token chose give zeros.

Shapes: T tokens, K top-k, E experts, H hidden size, I expert width.
The resident block gives every expert all T rows, each times its score, 0 where it was not chosen. An expert here gets
all T rows too, since a product's bits depend on how many there are; experts that no token chose are left out, and the
sum over experts runs over all E, zeros included, as there.
"""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from ..blocks import BlockLayout
from ..gates import Gate, choose_gate
from ..kernels import Product, loop_product, random_block
from .base import Place, outside_autograd
from .block import BlockLayer

log = logging.getLogger(__name__)

PROBE_TOKENS = (1, 2, 3, 7, 40)


def batched_product(x_MI: torch.Tensor, weight: torch.Tensor, transposed: bool) -> torch.Tensor:
    """Multiply with a batched matrix product of one batch."""
    return torch.bmm(x_MI[None], (weight if transposed else weight.t())[None])[0]


PRODUCTS: dict[str, Product] = {"loop": loop_product, "batched": batched_product}  # cheapest first


class Llama4Kernel(NamedTuple):
    """The product and the gate in use."""

    name: str
    product: Product
    gate: Gate


class Llama4Layer(BlockLayer):
    """Compute the block; `shared` is the kernel."""

    kind = "llama4"

    def __init__(self, place: Place, module: Any, shared: Llama4Kernel) -> None:
        super().__init__(place, module, shared)
        self.kernel = shared

    @classmethod
    def prepare(cls, module: Any, layout: BlockLayout) -> Llama4Kernel:
        """Choose the cheapest product that gives the bits of one product over all experts, on probes of this layout."""
        act_fn = module.emptied[0].experts.act_fn
        generator = torch.Generator().manual_seed(0)
        experts = [random_block(layout, generator) for _ in range(2)]
        down = experts[0]["down_proj"]
        gate = choose_gate(_gated(act_fn), down.shape[0], down.dtype)
        for name, product in PRODUCTS.items():
            if all(_agrees(experts, act_fn, tokens, Llama4Kernel(name, product, gate)) for tokens in PROBE_TOKENS):
                log.info("llama4 kernel %s, %s gate: equal to all experts at once on the probes", name, gate.name)
                return Llama4Kernel(name, product, gate)
        log.warning("llama4 kernel batched, %s gate: no product gave the probes' bits", gate.name)
        return Llama4Kernel("batched", batched_product, gate)

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
        out_ETH = hidden_TH.new_zeros(num_experts, *hidden_TH.shape)
        with self.acquire(ids_TK, torch.unique(ids_TK).tolist()) as experts:
            for expert, tensors in experts:
                x_TH = hidden_TH * scores_TE[:, expert, None]
                out_ETH[expert] = _expert_rows(tensors, x_TH, expert * num_tokens, scores_TE.numel(), self.kernel)
        return out_ETH.sum(dim=0)


def _expert_rows(
    tensors: dict[str, torch.Tensor], x_TH: torch.Tensor, start: int, total: int, kernel: Llama4Kernel
) -> torch.Tensor:
    """Compute one expert on all rows, which begin at `start` among the `total` rows of all experts."""
    up_TP = kernel.product(x_TH, tensors["gate_up_proj"], True)
    return kernel.product(kernel.gate.rows(up_TP, start, total), tensors["down_proj"], True)


def _gated(act_fn: Any) -> Any:
    """Describe the gate as `choose_gate` wants it: up times the activation of gate, which are halves of a row."""

    def apply(up_MP: torch.Tensor) -> torch.Tensor:
        gate, up = up_MP.chunk(2, dim=-1)
        return up * act_fn(gate)

    return SimpleNamespace(has_gate=True, is_concatenated=True, _apply_gate=apply)


def _agrees(experts: list[dict[str, torch.Tensor]], act_fn: Any, tokens: int, kernel: Llama4Kernel) -> bool:
    first, down = (torch.stack([block[name] for block in experts]) for name in ("gate_up_proj", "down_proj"))
    generator = torch.Generator().manual_seed(tokens)
    x_ETH = torch.randn(len(experts), tokens, first.shape[1], generator=generator).to(first.dtype)
    with torch.no_grad():
        gate, up = torch.bmm(x_ETH, first).chunk(2, dim=-1)
        expected = torch.bmm(up * act_fn(gate), down)
        rows = [
            _expert_rows(block, x_ETH[index], index * tokens, len(experts) * tokens, kernel)
            for index, block in enumerate(experts)
        ]
    return torch.equal(expected, torch.stack(rows))
