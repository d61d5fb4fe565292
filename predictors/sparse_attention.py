"""Attention with sparse weights: over the last W steps (as a band, or step by step over a ring), or over a sequence.

Knows hidden states; knows nothing of tokens or experts. The band over a sequence equals the ring step by step.
"""

# B batch, T tokens, H hidden width, A attention width, W window in steps, N blocks of W steps

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .entmax import ATTENTION_WEIGHTS, AttentionWeights
from .sparsemax import MASKED


class SparseAttention(nn.Module):
    """One head of sparse attention whose output has the width of its input.

    With a window it attends to the last steps (`step`, `band`), without one to a whole sequence (`full`).
    The ring is one tensor [B, W, 2A + 1]: key, value and a 1 where a step was written; the newest step is last.
    """

    def __init__(
        self, hidden_size: int, width: int, window: int | None, weights: AttentionWeights = "sparsemax"
    ) -> None:
        super().__init__()
        self.weigh = ATTENTION_WEIGHTS[weights]
        self.width, self.window = width, window or 0
        self.query = nn.Linear(hidden_size, width)
        self.key_value = nn.Linear(hidden_size, 2 * width)
        self.out = nn.Linear(width, hidden_size)
        if window is not None:
            self.age_W = nn.Parameter(torch.zeros(window))  # added to the scores of the newest step first

    def ring(self, batch: int) -> Tensor:
        """Give the ring before the first step."""
        return self.age_W.new_zeros(batch, self.window, 2 * self.width + 1)

    def _entries(self, x: Tensor) -> Tensor:
        return torch.cat([self.key_value(x), torch.ones_like(x[..., :1])], dim=-1)

    def _queries(self, x: Tensor) -> Tensor:
        return self.query(x) / math.sqrt(self.width)

    def step(self, x_BH: Tensor, ring_BWR: Tensor) -> tuple[Tensor, Tensor]:
        """Attend from one step to the last W, itself included; give the output and the next ring."""
        ring_BWR = torch.cat([ring_BWR[:, 1:], self._entries(x_BH)[:, None]], dim=1)
        keys, values, written = ring_BWR.split([self.width, self.width, 1], dim=-1)
        scores_BW = (keys @ self._queries(x_BH)[..., None])[..., 0] + self.age_W.flip(0)
        weights_BW = self.weigh(torch.where(written[..., 0] > 0, scores_BW, MASKED))
        return self.out((weights_BW[:, None] @ values)[:, 0]), ring_BWR

    def band(self, x_BTH: Tensor, ring_BWR: Tensor) -> tuple[Tensor, Tensor]:
        """Attend from every step of a sequence to the last W up to it; what `step` gives, all at once."""
        num_tokens, window = x_BTH.shape[1], self.window
        padding = -num_tokens % window
        entries = torch.cat([ring_BWR, self._entries(x_BTH)], dim=1)
        blocks = F.pad(entries, (0, 0, 0, padding)).unflatten(1, (-1, window))  # [B, N + 1, W, R], the ring first
        keys, values, written = torch.cat([blocks[:, :-1], blocks[:, 1:]], dim=2).split([self.width, self.width, 1], -1)
        queries = F.pad(self._queries(x_BTH), (0, 0, 0, padding)).unflatten(1, (-1, window))
        positions = torch.arange(window, device=x_BTH.device)
        age = positions[:, None] + window - torch.arange(2 * window, device=x_BTH.device)  # [W, 2W]
        inside = (age >= 0) & (age < window)
        scores = queries @ keys.transpose(-1, -2) + self.age_W[age.clamp(0, window - 1)]
        weights = self.weigh(torch.where(inside & (written[..., 0] > 0)[:, :, None], scores, MASKED))
        attended = (weights @ values).flatten(1, 2)[:, :num_tokens]
        return self.out(attended), entries[:, num_tokens:]

    def full(self, x_BTH: Tensor, mask_BT: Tensor, causal: bool) -> Tensor:
        """Attend to the whole sequence (with `causal`, up to each step); `mask_BT` is False on padding."""
        keys, values = self.key_value(x_BTH).split(self.width, dim=-1)
        scores_BTT = self._queries(x_BTH) @ keys.transpose(-1, -2)
        allowed = mask_BT[:, None, :]
        if causal:
            steps = torch.arange(x_BTH.shape[1], device=x_BTH.device)
            allowed = allowed & (steps[:, None] >= steps)
        return self.out(self.weigh(torch.where(allowed, scores_BTT, MASKED)) @ values)
