"""A layer of LSTM (Hochreiter and Schmidhuber 1997): over padded sequences in one or both directions, or step by step.

Knows sequences and padding; knows nothing of tokens or experts. Parameters and arithmetic are those of `torch.nn.LSTM`,
whose fused kernel runs whole sequences; what it lacks is padding that changes nothing, and an export of dynamic length.
"""

# T tokens, B batch, D input width, H hidden width per direction, C = directions * H

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class LstmState(NamedTuple):
    """What an LSTM carries from token to token."""

    hidden: Tensor
    """[B, H], its output."""
    cell: Tensor
    """[B, H]."""


class LstmLayer(nn.Module):
    """One LSTM layer; a bidirectional one is two of half the width, one of which reads from the end."""

    def __init__(self, input_size: int, hidden_size: int, *, bidirectional: bool = False) -> None:
        super().__init__()
        self.hidden_size, self.bidirectional = hidden_size, bidirectional
        self.output_size = hidden_size * (2 if bidirectional else 1)
        self.directions = nn.ModuleList(nn.LSTM(input_size, hidden_size) for _ in range(2 if bidirectional else 1))

    def start(self, batch: int) -> LstmState:
        """Give the state before the first token."""
        empty = next(self.parameters()).new_zeros(batch, self.hidden_size)
        return LstmState(empty, empty)

    def forward(self, x_TBD: Tensor, mask_TB: Tensor | None = None) -> Tensor:
        """Run whole sequences: hidden states [T, B, C].

        `mask_TB` is False on padding, which is skipped wherever it stands, and where the hidden state is 0.
        """
        if mask_TB is None:
            mask_TB = torch.ones(x_TBD.shape[:2], dtype=torch.bool, device=x_TBD.device)
        if torch.compiler.is_exporting():
            return self._scan(x_TBD, mask_TB)
        # a stable sort moves padding to the end, where it changes nothing before it; mostly it stands there already
        order_TB = None
        if not bool((mask_TB[1:] <= mask_TB[:-1]).all()):
            order_TB = torch.argsort(mask_TB.to(torch.uint8), dim=0, descending=True, stable=True)
            x_TBD = _take(x_TBD, order_TB)
        outputs = [self.directions[0](x_TBD)[0]]
        if self.bidirectional:
            steps_T1 = torch.arange(len(x_TBD), device=x_TBD.device)[:, None]
            mirror_TB = (mask_TB.sum(0) - 1 - steps_T1) % len(x_TBD)  # its own inverse
            outputs.append(_take(self.directions[1](_take(x_TBD, mirror_TB))[0], mirror_TB))
        hidden_TBC = torch.cat(outputs, dim=-1)
        if order_TB is not None:
            hidden_TBC = _take(hidden_TBC, torch.argsort(order_TB, dim=0))
        return hidden_TBC.masked_fill(~mask_TB[..., None], 0)

    def resume(self, x_TBD: Tensor, state: LstmState) -> tuple[Tensor, LstmState]:
        """Run a piece of sequences without padding from a state on; not of a bidirectional layer."""
        assert not self.bidirectional
        hidden_TBH, (hidden, cell) = self.directions[0](x_TBD, (state.hidden[None], state.cell[None]))
        return hidden_TBH, LstmState(hidden[0], cell[0])

    def step(self, x_BD: Tensor, state: LstmState) -> tuple[Tensor, LstmState]:
        """Run one token, in plain products that export at any batch; not of a bidirectional layer."""
        assert not self.bidirectional
        weights = dict(self.directions[0].named_parameters())
        given_BG = F.linear(x_BD, weights["weight_ih_l0"], weights["bias_ih_l0"])
        after = _cell(given_BG, state, weights["weight_hh_l0"], weights["bias_hh_l0"])
        return after.hidden, after

    def _scan(self, x_TBD: Tensor, mask_TB: Tensor) -> Tensor:
        """Run whole sequences through the `scan` operator, which exports with a dynamic length."""
        from torch._higher_order_ops.scan import scan

        outputs = []
        for index, direction in enumerate(self.directions):
            weights = dict(direction.named_parameters())
            own, bias = weights["weight_hh_l0"], weights["bias_hh_l0"]

            def cell(
                carried: tuple[Tensor, Tensor], step: tuple[Tensor, Tensor], own: Tensor = own, bias: Tensor = bias
            ) -> tuple[tuple[Tensor, Tensor], Tensor]:
                given_BG, real_B1 = step
                after = _cell(given_BG, LstmState(*carried), own, bias)
                hidden, kept = (
                    torch.where(real_B1 > 0, new, old) for new, old in zip(after, carried, strict=True)
                )  # padding keeps the state
                return (hidden, kept), hidden.clone()  # an output may not alias the carried state

            given_TBG = F.linear(x_TBD, weights["weight_ih_l0"], weights["bias_ih_l0"])
            steps = given_TBG, mask_TB[..., None].to(x_TBD.dtype)
            if index:
                steps = tuple(part.flip(0) for part in steps)
            empty = x_TBD.new_zeros(x_TBD.shape[1], self.hidden_size)
            _, hidden_TBH = scan(cell, (empty, empty.clone()), steps)  # pyright: ignore
            outputs.append(hidden_TBH.flip(0) if index else hidden_TBH)
        return torch.cat(outputs, dim=-1) * mask_TB[..., None].to(x_TBD.dtype)


def _cell(given_BG: Tensor, state: LstmState, own: Tensor, bias: Tensor) -> LstmState:
    """Give the state after a token whose products with the input weights are given, [B, 4H]."""
    enter, keep, candidate, show = (given_BG + F.linear(state.hidden, own, bias)).chunk(4, dim=-1)
    cell = torch.sigmoid(keep) * state.cell + torch.sigmoid(enter) * torch.tanh(candidate)
    return LstmState(torch.sigmoid(show) * torch.tanh(cell), cell)


def _take(values_TBC: Tensor, order_TB: Tensor) -> Tensor:
    """Give the steps of each sequence in another order."""
    return values_TBC.gather(0, order_TB[..., None].expand(-1, -1, values_TBC.shape[-1]))
