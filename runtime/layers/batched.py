"""Kernel of experts that the resident model multiplies all at once, in one batched product over experts.

Shapes: T tokens, E experts, H hidden size, I expert width, P = 2 I.
Alone, a product is shared out to threads; in a batch, each thread takes whole products. On 2 threads float32 products
of 5 and 7 rows differ by that (256 x 416, E = 2 .. 16), and have the batch's bits in a batch of two copies: as slow as
one of the batch's products, at the cost of a second thread that computes the same.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch

from ..blocks import TORCH_NAMES, BlockLayout
from ..gates import choose_gate
from ..kernels import Product, loop_product, random_block

log = logging.getLogger(__name__)

PROBE_TOKENS = (1, 2, 3, 5, 7, 16)


class BatchedKernel:
    """Compute an expert with the bits that it has in a product over all experts, at any number of threads.

    Args:
        gated: what is between the two products, as `choose_gate` takes it.
        layout: of blocks with `gate_up_proj` [H, P] and `down_proj` [I, H].
        num_experts: E.
    """

    def __init__(self, gated: Any, layout: BlockLayout, num_experts: int) -> None:
        self.layout, self.num_experts = layout, num_experts
        down = next(spec for spec in layout.tensors if spec.name == "down_proj")
        self.gate = choose_gate(gated, down.shape[0], getattr(torch, TORCH_NAMES[down.dtype]))
        self._products: dict[int, Product] = {}  # by number of threads
        self.product()

    def rows(self, tensors: Mapping[str, torch.Tensor], x_TH: torch.Tensor, start: int, total: int) -> torch.Tensor:
        """Compute one expert on all rows, which begin at `start` among the `total` rows of all experts."""
        product = self.product()
        act_TI = self.gate.rows(product(x_TH, tensors["gate_up_proj"], True), start, total)
        return product(act_TI, tensors["down_proj"], True)

    def product(self) -> Product:
        """Give the cheapest product that has the batch's bits at the present number of threads, on probes."""
        threads = torch.get_num_threads()
        if threads not in self._products:
            self._products[threads] = self._choose(threads)
        return self._products[threads]

    def _choose(self, threads: int) -> Product:
        products: dict[str, Product] = {
            "loop": loop_product,
            f"{threads} copies": copies_product(threads),
            f"{self.num_experts} copies": copies_product(self.num_experts),
        }
        weights = random_block(self.layout, torch.Generator().manual_seed(0)).values()
        for name, product in products.items():
            if all(self._agrees(product, weight, tokens) for weight in weights for tokens in PROBE_TOKENS):
                log.info("batched experts, %d threads: %s is equal to all experts at once on probes", threads, name)
                return product
        log.warning("batched experts, %d threads: no product gave the probes' bits, taking the last", threads)
        return products[f"{self.num_experts} copies"]

    def _agrees(self, product: Product, weight: torch.Tensor, tokens: int) -> bool:
        # a batch as large as it takes to give every thread a product; 16 experts of 60 MiB took 9.5 s and 720 MiB
        count = min(self.num_experts, max(2, torch.get_num_threads()))
        generator = torch.Generator().manual_seed(tokens)
        x_ETH = torch.randn(count, tokens, len(weight), generator=generator).to(weight.dtype)
        with torch.no_grad():
            expected = torch.bmm(x_ETH, weight.expand(count, *weight.shape))
            return all(torch.equal(product(x_TH, weight, True), out) for x_TH, out in zip(x_ETH, expected, strict=True))


def copies_product(copies: int) -> Product:
    """Make a product that is one of a batch of copies."""

    def product(x_MI: torch.Tensor, weight: torch.Tensor, transposed: bool) -> torch.Tensor:
        matrix = weight if transposed else weight.t()
        return torch.bmm(x_MI.expand(copies, *x_MI.shape), matrix.expand(copies, *matrix.shape))[0]

    return product
