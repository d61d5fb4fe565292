"""Gates of one expert's rows, with the bits that they have among all rows of an event. Knows tensors and threads.

Shapes: S rows of the event, M rows of one expert, I expert width, P numbers that make up one of them: gate and up, or
up alone.

The resident model gates all S rows at once, and PyTorch works through S * I numbers in pieces: one per thread where
there are more than 32,768, and in each piece whole vector registers first and what is left one by one, with another
exp. So the last bit of a number depends on where in its piece it stands. Two layouts matter:
  rows   gate and up are halves of a row: each row is a run of its own, and a thread may begin inside of one;
  flat   gate and up alternate, or there is no gate: all rows are one run.
Example: 2 threads and 993 rows of 48 begin the second piece at number 23,832, in mid-row of row 496; its halves are
computed as two runs of 24, one by one, where 32 of 48 would go through registers.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, Protocol

import torch

PIECE = 32768  # at::internal::GRAIN_SIZE: what is not more is not shared out to threads
VECTOR = 64  # numbers; a multiple of what PyTorch takes at a time on every CPU, at 16 and at 32 bits
PROBE_ROWS = (1, 2, 3, 7, 18)


class Gate(Protocol):
    """Compute what comes between the two products of an expert."""

    name: str

    def rows(self, up_MP: torch.Tensor, start: int, total: int) -> torch.Tensor:
        """Give [M, I] for the rows of an expert, which begin at `start` among `total` rows."""
        ...


class RowGate:
    """Gate rows that are runs of their own."""

    name = "row"

    def __init__(self, module: Any) -> None:
        self._apply: Callable[[torch.Tensor], torch.Tensor] = module._apply_gate

    def rows(self, up_MP: torch.Tensor, start: int, total: int) -> torch.Tensor:
        """Give [M, I]; rows in which a thread of the resident model begins are computed in two parts."""
        width = up_MP.shape[1] // 2
        if any(begin % width % VECTOR for begin, _ in pieces(len(up_MP) * width)):
            act_MI = torch.cat([self._apply(part) for part in up_MP.split(max(1, PIECE // width))])
        else:
            act_MI = self._apply(up_MP)
        for begin, _ in pieces(total * width):
            row, column = divmod(begin, width)
            if column % VECTOR and start <= row < start + len(up_MP):
                halves = up_MP[row - start].view(2, width)
                parts = [half.reshape(1, -1) for half in (halves[:, :column], halves[:, column:])]
                act_MI[row - start] = torch.cat([self._apply(part)[0] for part in parts])
        return act_MI


class FlatGate:
    """Gate rows that are one run."""

    name = "flat"

    def __init__(self, module: Any) -> None:
        self._apply: Callable[[torch.Tensor], torch.Tensor] = module._apply_gate if module.has_gate else module.act_fn
        self._per = 2 if module.has_gate else 1

    def rows(self, up_MP: torch.Tensor, start: int, total: int) -> torch.Tensor:
        """Give [M, I]; what the resident model computes one by one is computed anew."""
        per, width = self._per, up_MP.shape[1] // self._per
        count, offset = len(up_MP) * width, start * width
        if count % VECTOR == 0 and total * width <= PIECE and total * width % VECTOR == 0:
            return self._apply(up_MP)
        flat = up_MP.reshape(1, -1)
        padded = torch.nn.functional.pad(flat, (0, per * (-count % VECTOR)))
        act = torch.cat([self._apply(part)[0] for part in padded.split(per * PIECE, dim=1)])[:count]
        for begin, end in pieces(total * width):
            tail = end - (end - begin) % VECTOR
            low, high = max(tail, offset), min(end, offset + count)
            if low < high:
                alone = flat.new_zeros(1, per * (end - tail))
                alone[:, per * (low - tail) : per * (high - tail)] = flat[
                    :, per * (low - offset) : per * (high - offset)
                ]
                act[low - offset : high - offset] = self._apply(alone)[0, low - tail : high - tail]
        return act.view(len(up_MP), width)


class WholeGate:
    """Gate rows at their place among all the others: any gate's bits, at the price of all rows for each expert."""

    name = "whole"

    def __init__(self, module: Any) -> None:
        self._apply: Callable[[torch.Tensor], torch.Tensor] = module._apply_gate if module.has_gate else module.act_fn

    def rows(self, up_MP: torch.Tensor, start: int, total: int) -> torch.Tensor:
        """Give [M, I]."""
        up_SP = up_MP.new_zeros(total, up_MP.shape[1])
        up_SP[start : start + len(up_MP)] = up_MP
        return self._apply(up_SP)[start : start + len(up_MP)]


def pieces(total: int) -> list[tuple[int, int]]:
    """List the ranges in which PyTorch computes an element-wise operation on `total` numbers, one per thread."""
    parts = min(torch.get_num_threads(), -(-total // PIECE)) if total > PIECE else 1
    size = max(1, -(-total // parts))
    return [(begin, min(total, begin + size)) for begin in range(0, total, size)]


def choose_gate(module: Any, width: int, dtype: torch.dtype) -> Gate:
    """Choose the cheapest gate that gives the bits of all rows gated at once, on probes up to several pieces.

    Args:
        width: I, the width of the down projection.
    """
    likely = RowGate(module) if module.has_gate and module.is_concatenated else FlatGate(module)
    whole = WholeGate(module)
    generator = torch.Generator().manual_seed(0)
    for total in (*PROBE_ROWS, PIECE // width + 3, 3 * PIECE // width + 4):
        up_SP = (2.0 * torch.randn(total, width * (2 if module.has_gate else 1), generator=generator)).to(dtype)
        bounds = sorted({0, total // 3, total // 2, total})
        with torch.no_grad():
            parts = [likely.rows(up_SP[a:b], a, total) for a, b in itertools.pairwise(bounds)]
            if not torch.equal(torch.cat(parts), whole.rows(up_SP, 0, total)):
                return whole
    return likely
