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
from .gates import Gate, choose_gate

log = logging.getLogger(__name__)

Product = Callable[[torch.Tensor, torch.Tensor, bool], torch.Tensor]
PROBE_ROWS = ((1, 1), (2, 1), (3, 4), (5, 3), (7, 14), (40, 9))  # rows of the probe's experts: decode to prefill


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
    """The product and the gate in use and why."""

    name: str
    product: Product
    gate: Gate
    reason: str


def expert_rows(
    module: Any, tensors: Mapping[str, torch.Tensor], x_SH: torch.Tensor, rows: slice, kernel: Kernel
) -> torch.Tensor:
    """Compute one expert on its rows [M, H] of all: up, gate, down, and biases where there are any."""
    first = "gate_up_proj" if module.has_gate else "up_proj"
    up_MI = kernel.product(x_SH[rows], tensors[first], module.is_transposed)
    if module.has_bias:
        up_MI.add_(tensors[f"{first}_bias"])
    act_MI = kernel.gate.rows(up_MI, rows.start, len(x_SH))
    out_MH = kernel.product(act_MI, tensors["down_proj"], module.is_transposed)
    if module.has_bias:
        out_MH.add_(tensors["down_proj_bias"])
    return out_MH


def choose_kernel(module: Any, layout: BlockLayout) -> Kernel:
    """Choose the cheapest product that gives the bits of transformers' grouped_mm on probes of this layout.

    Falls back to the resident model's own product where none does, and to `loop` where grouped_mm does not run: on
    rows of bfloat16 that are no multiple of 16 bytes.
    """
    generator = torch.Generator().manual_seed(0)
    experts = [random_block(layout, generator) for _ in range(2)]
    twin = _stand_in(module, experts)
    down = experts[0]["down_proj"]
    gate = choose_gate(module, down.shape[0] if module.is_transposed else down.shape[1], down.dtype)
    try:
        for name, product in PRODUCTS.items():
            kernel = Kernel(name, product, gate, "")
            if all(_agrees(twin, experts, rows, kernel, generator) for rows in PROBE_ROWS):
                probes = f"{len(PROBE_ROWS)} probes ({down.dtype}, {layout.nbytes} bytes)"
                reason = f"equal to grouped_mm bit for bit on {probes}"
                log.info("expert kernel %s, %s gate: %s", name, gate.name, reason)
                return kernel._replace(reason=reason)
    except RuntimeError as error:
        reason = f"grouped_mm does not run on this layout ({error})"
        log.warning("expert kernel loop, %s gate: %s", gate.name, reason)
        return Kernel("loop", loop_product, gate, reason)
    reason = "no product gave the probes' bits; this is the resident model's own"
    log.warning("expert kernel grouped, %s gate: %s", gate.name, reason)
    return Kernel("grouped", grouped_product, gate, reason)


def _agrees(
    twin: Any,
    experts: list[dict[str, torch.Tensor]],
    rows: tuple[int, int],
    kernel: Kernel,
    generator: torch.Generator,
) -> bool:
    first = experts[0]["gate_up_proj" if twin.has_gate else "up_proj"]
    hidden_size = first.shape[0] if twin.is_transposed else first.shape[1]
    x_TH = torch.randn(sum(rows), hidden_size, generator=generator).to(first.dtype)
    ids_T1 = torch.repeat_interleave(torch.arange(2), torch.tensor(rows))[:, None]
    with torch.no_grad():
        expected = grouped_mm_experts_forward(twin, x_TH, ids_T1, torch.ones_like(ids_T1, dtype=first.dtype))
        perm = torch.sort(ids_T1[:, 0]).indices  # not stable: rows of one expert change places
        places = (slice(0, rows[0]), slice(rows[0], sum(rows)))
        found = torch.cat([expert_rows(twin, experts[e], x_TH[perm], places[e], kernel) for e in range(2)])
        if twin.has_post_expert_norm:
            found = twin.post_expert_norm(found)
    return torch.equal(expected[perm], found.to(expected.dtype))


def random_block(layout: BlockLayout, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Fill a block with random numbers that bring gates out of their linear range.

    The numbers repeat: a 350 MB expert would take seconds to draw.
    """
    # torch's memory, since products may depend on the alignment that slots have too
    tensors = views(torch.empty(layout.nbytes, dtype=torch.uint8).numpy().data, layout)
    for tensor in tensors.values():
        flat = tensor.view(-1)
        drawn = torch.randn(min(flat.numel(), 1 << 16), generator=generator) * 2.0 / max(tensor.shape) ** 0.5
        for start in range(0, flat.numel(), len(drawn)):
            part = flat[start : start + len(drawn)]
            part.copy_(drawn[: len(part)])
    return tensors


def _stand_in(module: nn.Module, experts: list[dict[str, torch.Tensor]]) -> nn.Module:
    """Copy the module with a few experts in place of its own parameters."""
    twin = copy.copy(module)
    stacked = {name: torch.stack([block[name] for block in experts]) for name in experts[0]}
    twin._parameters = {name: nn.Parameter(value, requires_grad=False) for name, value in stacked.items()}
    twin.num_experts = len(experts)  # type: ignore[assignment]
    return twin
