"""Expert kernels: the matrix products of one expert's tokens, and which of them give the resident model's bits.

Shapes: T tokens, K top-k, S = T * K rows, M rows of one expert, H hidden size, I expert width.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers.integrations.moe import grouped_mm_experts_forward

from .blocks import BlockLayout, views

log = logging.getLogger(__name__)

Product = Callable[[torch.Tensor, torch.Tensor, bool], torch.Tensor]
PROBE_ROWS = ((1, 1), (2, 1), (5, 3), (40, 9))  # rows of the probe's experts: decode, small batches, prefill


def loop_product(x_MI: torch.Tensor, weight: torch.Tensor, transposed: bool) -> torch.Tensor:
    """Multiply with one plain matrix product."""
    return torch.mm(x_MI, weight if transposed else weight.t())


def grouped_product(x_MI: torch.Tensor, weight: torch.Tensor, transposed: bool) -> torch.Tensor:
    """Multiply with a grouped matrix product of one group."""
    stacked = weight[None] if transposed else weight.t()[None]
    offsets = torch.tensor([len(x_MI)], dtype=torch.int32, device=x_MI.device)
    return torch.nn.functional.grouped_mm(x_MI.to(weight.dtype), stacked, offs=offsets)


PRODUCTS: dict[str, Product] = {"loop": loop_product, "grouped": grouped_product}  # cheapest first


class Kernel(NamedTuple):
    """The product in use and why."""

    name: str
    product: Product
    reason: str


def expert_rows(module: Any, tensors: Mapping[str, torch.Tensor], x_MH: torch.Tensor, product: Product) -> torch.Tensor:
    """Compute one expert on its rows [M, H]: up, gate, down, with the module's own gate and biases."""
    first = "gate_up_proj" if module.has_gate else "up_proj"
    up_MI = product(x_MH, tensors[first], module.is_transposed)
    if module.has_bias:
        up_MI.add_(tensors[f"{first}_bias"])
    act_MI = module._apply_gate(up_MI) if module.has_gate else module.act_fn(up_MI)
    out_MH = product(act_MI, tensors["down_proj"], module.is_transposed)
    if module.has_bias:
        out_MH.add_(tensors["down_proj_bias"])
    return out_MH


def choose_kernel(module: Any, layout: BlockLayout) -> Kernel:
    """Choose the cheapest product that gives the bits of transformers' grouped_mm on a probe of this layout.

    Falls back to `grouped`, the resident model's own product, where no other does.
    """
    generator = torch.Generator().manual_seed(0)
    experts = [_random_block(layout, generator) for _ in range(2)]
    twin = _stand_in(module, experts)
    dtype = experts[0]["down_proj"].dtype
    first = experts[0]["gate_up_proj" if module.has_gate else "up_proj"]
    hidden_size = first.shape[0] if module.is_transposed else first.shape[1]
    for name, product in PRODUCTS.items():
        if all(_agrees(twin, experts, rows, dtype, hidden_size, product, generator) for rows in PROBE_ROWS):
            reason = f"equal to grouped_mm bit for bit on {len(PROBE_ROWS)} probes ({dtype}, {layout.nbytes} bytes)"
            log.info("expert kernel %s: %s", name, reason)
            return Kernel(name, product, reason)
    reason = "no product gave the probe's bits; this is the resident model's own"
    log.warning("expert kernel grouped: %s", reason)
    return Kernel("grouped", grouped_product, reason)


def _agrees(
    twin: nn.Module,
    experts: list[dict[str, torch.Tensor]],
    rows: tuple[int, int],
    dtype: torch.dtype,
    hidden_size: int,
    product: Product,
    generator: torch.Generator,
) -> bool:
    x_TH = torch.randn(sum(rows), hidden_size, generator=generator).to(dtype)
    ids_T1 = torch.repeat_interleave(torch.arange(2), torch.tensor(rows))[:, None]
    with torch.no_grad():
        expected = grouped_mm_experts_forward(twin, x_TH, ids_T1, torch.ones_like(ids_T1, dtype=dtype))
        parts = [expert_rows(twin, experts[e], x_TH[ids_T1[:, 0] == e], product) for e in range(2)]
        found = torch.cat(parts)
        if getattr(twin, "has_post_expert_norm", False):
            found = twin.post_expert_norm(found)  # type: ignore[operator]
    return torch.equal(expected, found.to(expected.dtype))


def _random_block(layout: BlockLayout, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Fill a block with small random numbers, repeated: a 350 MB expert would take seconds to draw."""
    tensors = views(bytearray(layout.nbytes), layout)
    for tensor in tensors.values():
        flat = tensor.view(-1)
        drawn = (torch.randn(min(flat.numel(), 1 << 16), generator=generator) * 0.05).to(tensor.dtype)
        for start in range(0, flat.numel(), drawn.numel()):
            part = flat[start : start + drawn.numel()]
            part.copy_(drawn[: part.numel()])
    return tensors


def _stand_in(module: nn.Module, experts: list[dict[str, torch.Tensor]]) -> nn.Module:
    """Copy the module with a few experts in place of its own parameters."""
    twin = copy.copy(module)
    stacked = {name: torch.stack([block[name] for block in experts]) for name in experts[0]}
    twin._parameters = {name: nn.Parameter(value, requires_grad=False) for name, value in stacked.items()}
    twin.num_experts = len(experts)  # type: ignore[assignment]
    return twin
