"""Which recurrence an SRU layer runs on: the fused CUDA kernel of the `sru` package, or the torch twin everywhere else.

Knows the package by its SRUCell alone, which is fed a layer's own parameters. It is imported at the first sequence on a
CUDA device, since importing it compiles for half a minute; that it runs there and agrees with the twin is tried once.
"""

# T tokens, B batch, D input width, C output width

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

log = logging.getLogger(__name__)

AGREED = 1e-4  # largest difference from the twin on the device; on a CPU it is below 1e-6

Sizes = tuple[int, int, bool]  # input width, hidden width per direction, whether bidirectional


class Kernel(NamedTuple):
    """Hold the package's cell."""

    cell: Callable[..., nn.Module]
    """SRUCell."""

    def run(
        self, sizes: Sizes, weights: Mapping[str, Tensor], x_TBD: Tensor, c0_BC: Tensor | None, mask_TB: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Run a sequence with a layer's parameters, as its own `forward` does."""
        if c0_BC is None:
            c0_BC = x_TBD.new_zeros(x_TBD.shape[1], weights["bias"].shape[0] // 2)
        padding = None if mask_TB is None else ~mask_TB
        template = _template(self.cell, sizes)
        return torch.func.functional_call(template, dict(weights), (x_TBD.contiguous(), c0_BC, padding))


@functools.lru_cache(maxsize=16)
def _template(cell: Callable[..., nn.Module], sizes: Sizes) -> nn.Module:
    """Give a cell of these sizes; its own parameters are never used."""
    input_size, hidden_size, bidirectional = sizes
    with torch.random.fork_rng(devices=[]):  # that its weights are drawn must not move what comes after
        return cell(input_size, hidden_size, bidirectional=bidirectional)


def import_cell() -> Callable[..., nn.Module]:
    """Give the package's SRUCell; its import compiles, and warns of what it does."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from sru import SRUCell
    return SRUCell


Twin = Callable[[Sizes, Mapping[str, Tensor], Tensor, Tensor], tuple[Tensor, Tensor]]


@functools.cache
def choose_kernel(device: torch.device, twin: Twin) -> Kernel | None:
    """Give the package's kernel for a device, None for the twin; decided once and logged with its reason.

    Args:
        device: where sequences are.
        twin: runs a layer of given sizes and parameters in torch over a padded sequence, for comparison.
    """
    if device.type != "cuda":
        return None
    try:
        kernel = Kernel(import_cell())
        difference = _difference(kernel, twin, device)
    except Exception as error:  # what it raises depends on compiler, toolkit and device
        log.info("SRU recurrence: torch, since the sru package does not run on %s (%s)", device, _first_line(error))
        return None
    if not difference < AGREED:
        log.warning("SRU recurrence: torch, since the sru package differs by %.2g on %s", difference, device)
        return None
    log.info("SRU recurrence: the kernel of the sru package, on %s", device)
    return kernel


def _difference(kernel: Kernel, twin: Twin, device: torch.device) -> float:
    """Give the largest difference of outputs and gradients on a padded sequence."""
    drawn = torch.Generator().manual_seed(0)
    sizes: Sizes = (5, 4, True)
    shapes = {"weight": (5, 32), "weight_c": (16,), "bias": (16,), "x": (7, 3, 5)}
    values = {name: torch.randn(shape, generator=drawn).to(device) for name, shape in shapes.items()}
    mask = (torch.arange(7)[:, None] < torch.tensor([7, 4, 1])).to(device)
    found: list[list[Tensor]] = []
    for by_package in (True, False):
        leaves = {name: value.clone().requires_grad_() for name, value in values.items()}
        weights = {name: leaf for name, leaf in leaves.items() if name != "x"}
        weights["scale_x"] = torch.ones(1, device=device)
        with torch.enable_grad(), torch.autocast(device.type, enabled=False):
            if by_package:
                hidden, cell = kernel.run(sizes, weights, leaves["x"], None, mask)
            else:
                hidden, cell = twin(sizes, weights, leaves["x"], mask)
            gradients = torch.autograd.grad(hidden.square().sum() + cell.sum(), list(leaves.values()))
        found.append([hidden, cell, *gradients])
    largest = [(a - b).detach().abs().max() for a, b in zip(*found, strict=True)]
    return float(torch.stack(largest).max())  # nan if any is


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
