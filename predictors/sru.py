"""Simple Recurrent Unit (Lei et al. 2018) in plain torch, a twin of SRUCell of `sru` 2.6.0: equal parameters.

Knows sequences and padding; knows nothing of tokens or experts. Whole sequences on a CUDA device go through the kernel
of the package where it runs (`sru_kernel`); all else, and every export, is computed here. With x' = scale * x, or where
the widths differ a fourth projection of x (whose initial weights carry the scale):
    f_t = sigmoid(W_f x_t + v_f * c_{t-1} + b_f)        c_t = f_t * c_{t-1} + (1 - f_t) * (W x_t)
    r_t = sigmoid(W_r x_t + v_r * c_{t-1} + b_r)        h_t = r_t * c_t + (1 - r_t) * x'_t
All products with x run over the whole sequence at once. What is left of the recurrence is elementwise: three small
operations a step forward, one a step backward; both directions of a bidirectional layer share one loop.
"""

# T tokens, B batch, D input width, H hidden width per direction, C = directions * H, M matrices (3, or 4 where D != C)

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from .sru_kernel import Sizes, choose_kernel

FROZEN = 1e4  # forget logit of padding: its sigmoid is exactly 1, so the cell keeps its state through padding


class _Recurrence(torch.autograd.Function):
    """Compute all cell states of c_t = g_t c_{t-1} + (1 - g_t) candidate_t with g_t = sigmoid(forget_t + v c_{t-1})."""

    @staticmethod
    def forward(ctx: Any, candidate_TBC: Tensor, forget_TBC: Tensor, c0_BC: Tensor, peephole_C: Tensor) -> Tensor:
        cells_TBC, gates_TBC = torch.empty_like(candidate_TBC), torch.empty_like(candidate_TBC)
        previous_BC = c0_BC
        steps = zip(
            candidate_TBC.unbind(), forget_TBC.unbind(), gates_TBC.unbind(), cells_TBC.unbind(), strict=True
        )  # unbound once: indexing inside the loop costs as much as the arithmetic
        for candidate_BC, forget_BC, gate_BC, cell_BC in steps:
            torch.addcmul(forget_BC, previous_BC, peephole_C, out=gate_BC).sigmoid_()
            previous_BC = torch.lerp(candidate_BC, previous_BC, gate_BC, out=cell_BC)
        ctx.save_for_backward(candidate_TBC, gates_TBC, cells_TBC, c0_BC, peephole_C)
        return cells_TBC

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        candidate_TBC, gates_TBC, cells_TBC, c0_BC, peephole_C = ctx.saved_tensors
        previous_TBC = torch.cat([c0_BC[None], cells_TBC[:-1]])
        slope_TBC = (previous_TBC - candidate_TBC) * gates_TBC * (1 - gates_TBC)  # d c_t / d forget_t
        carry_TBC = torch.addcmul(gates_TBC, slope_TBC, peephole_C)  # d c_t / d c_{t-1}
        total_TBC = grads[0].clone()
        totals, carries = total_TBC.unbind(), carry_TBC.unbind()
        for t in range(len(totals) - 1, 0, -1):
            torch.addcmul(totals[t - 1], totals[t], carries[t], out=totals[t - 1])
        forget_grad_TBC = total_TBC * slope_TBC
        return (
            total_TBC * (1 - gates_TBC),
            forget_grad_TBC,
            totals[0] * carries[0],
            (forget_grad_TBC * previous_TBC).sum((0, 1)),
        )


def _scan_recurrence(candidate_TBC: Tensor, forget_TBC: Tensor, c0_BC: Tensor, peephole_C: Tensor) -> Tensor:
    """Compute what `_Recurrence` computes through the `scan` operator, which exports with a dynamic length."""
    from torch._higher_order_ops.scan import scan

    def cell(state_BC: Tensor, step: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        candidate_BC, forget_BC = step
        gate_BC = torch.sigmoid(forget_BC + state_BC * peephole_C)
        state_BC = state_BC * gate_BC + candidate_BC * (1 - gate_BC)
        return state_BC, state_BC.clone()  # an output may not alias the carried state

    _, cells_TBC = scan(cell, c0_BC, (candidate_TBC.contiguous(), forget_TBC.contiguous()))  # pyright: ignore
    return cells_TBC


def recurrence(candidate_TBC: Tensor, forget_TBC: Tensor, c0_BC: Tensor, peephole_C: Tensor) -> Tensor:
    """Run the elementwise recurrence over a sequence and give all cell states [T, B, C]."""
    if torch.compiler.is_exporting():
        return _scan_recurrence(candidate_TBC, forget_TBC, c0_BC, peephole_C)
    cells = _Recurrence.apply(candidate_TBC, forget_TBC, c0_BC, peephole_C)
    assert isinstance(cells, Tensor)
    return cells


class SruLayer(nn.Module):
    """One SRU layer; parameters `weight [D, C*M]`, `weight_c [2C]`, `bias [2C]` as in `sru.SRUCell`.

    Columns of `weight` are ordered (direction, unit, matrix), matrices being candidate, forget, reset and skip.
    """

    def __init__(
        self, input_size: int, hidden_size: int, *, bidirectional: bool = False, highway_bias: float = -1.0
    ) -> None:
        super().__init__()
        self.input_size, self.hidden_size, self.bidirectional = input_size, hidden_size, bidirectional
        self.output_size = hidden_size * (2 if bidirectional else 1)
        self.num_matrices = 3 if input_size == self.output_size else 4
        self.highway_bias = highway_bias
        self.weight = nn.Parameter(torch.empty(input_size, self.output_size * self.num_matrices))
        self.weight_c = nn.Parameter(torch.empty(2 * self.output_size))
        self.bias = nn.Parameter(torch.empty(2 * self.output_size))
        self.scale_x: Tensor
        self.register_buffer("scale_x", torch.ones(1))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw weights whose outputs keep the variance of their inputs."""
        bound = math.sqrt(3 / self.input_size)  # uniform(-b, b) has variance b^2 / 3
        self.weight.uniform_(-bound, bound)
        by_matrix = self.weight.view(self.input_size, self.output_size, self.num_matrices)
        by_matrix[..., 1:3].mul_(math.sqrt(0.5))  # each gate sums two terms of equal variance
        self.weight_c.uniform_(-math.sqrt(1.5), math.sqrt(1.5))
        self.bias.zero_()
        self.bias[self.output_size :] = self.highway_bias
        scale = math.sqrt(1 + 2 * math.exp(self.highway_bias))  # paper, section 3.2: the highway shrinks variance
        self.scale_x.fill_(scale)
        if self.num_matrices == 4:
            by_matrix[..., 3].mul_(scale)

    def _project(self, x: Tensor) -> tuple[Tensor, ...]:
        """Give candidate, forget logits and reset logits without their peepholes, and x' [..., C]."""
        columns = self.weight.view(self.input_size, self.output_size, self.num_matrices).transpose(1, 2)
        product = (x @ columns.reshape(self.input_size, -1)).to(self.bias.dtype)  # gates sum up: not in half precision
        parts = torch.split(product, self.output_size, dim=-1)
        forget_bias, reset_bias = self.bias.split(self.output_size)
        skip = parts[3] if self.num_matrices == 4 else x * self.scale_x
        return parts[0], parts[1] + forget_bias, parts[2] + reset_bias, skip

    def _mirror(self, values_TBC: Tensor) -> Tensor:
        """Reverse the time of the second direction; its own inverse."""
        if not self.bidirectional:
            return values_TBC
        forward, backward = values_TBC.split(self.hidden_size, dim=-1)
        return torch.cat([forward, backward.flip(0)], dim=-1)

    def forward(
        self, x_TBD: Tensor, c0_BC: Tensor | None = None, mask_TB: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Run a sequence: hidden states [T, B, C] and the last cell state [B, C].

        `mask_TB` is False on padding, where the cell keeps its state and the hidden state is 0.
        """
        if not torch.compiler.is_exporting() and (kernel := choose_kernel(x_TBD.device, _by_torch)):
            weights = {**dict(self.named_parameters()), **dict(self.named_buffers())}
            sizes = (self.input_size, self.hidden_size, self.bidirectional)
            return kernel.run(sizes, weights, x_TBD, c0_BC, mask_TB)
        return self.run(x_TBD, c0_BC, mask_TB)

    def run(self, x_TBD: Tensor, c0_BC: Tensor | None = None, mask_TB: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Run a sequence in plain torch, whatever the device."""
        candidate, forget, reset, skip = self._project(x_TBD)
        if c0_BC is None:
            c0_BC = self.bias.new_zeros(x_TBD.shape[1], self.output_size)
        if mask_TB is not None:
            forget = forget.masked_fill(~mask_TB[..., None], FROZEN)
        forget_peephole, reset_peephole = self.weight_c.split(self.output_size)
        cells = recurrence(self._mirror(candidate), self._mirror(forget), c0_BC, forget_peephole)
        previous = torch.cat([c0_BC[None], cells[:-1]])
        gate = torch.sigmoid(torch.addcmul(reset, self._mirror(previous), reset_peephole))
        hidden = torch.lerp(skip, self._mirror(cells), gate)
        if mask_TB is not None:
            hidden = hidden.masked_fill(~mask_TB[..., None], 0)
        return hidden, cells[-1]

    def step(self, x_BD: Tensor, c_BC: Tensor) -> tuple[Tensor, Tensor]:
        """Run one token of a layer that is not bidirectional: hidden state and cell state, both [B, C]."""
        candidate, forget, reset, skip = self._project(x_BD)
        forget_peephole, reset_peephole = self.weight_c.split(self.output_size)
        gate = torch.sigmoid(forget + c_BC * forget_peephole)
        next_BC = c_BC * gate + candidate * (1 - gate)
        gate = torch.sigmoid(reset + c_BC * reset_peephole)
        return next_BC * gate + skip * (1 - gate), next_BC


def _by_torch(sizes: Sizes, weights: Mapping[str, Tensor], x_TBD: Tensor, mask_TB: Tensor) -> tuple[Tensor, Tensor]:
    """Run a layer of these sizes and parameters in plain torch."""
    input_size, hidden_size, bidirectional = sizes
    layer = _Plain(input_size, hidden_size, bidirectional=bidirectional)
    return torch.func.functional_call(layer, dict(weights), (x_TBD, None, mask_TB))


class _Plain(SruLayer):
    """An SRU layer that never asks for the package."""

    forward = SruLayer.run
