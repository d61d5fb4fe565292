"""Attention of several heads whose scores know the distance between tokens, as in T5 (Raffel et al. 2020).

Knows hidden states; knows nothing of tokens or experts. One function attends, whatever the layout: a sequence to all of
itself, a band of blocks to the last W steps, or one step to a ring of W.
"""

# T queries, S sources, H hidden width, N heads, A width of a head, W window in steps

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .sparsemax import MASKED

BUCKETS, FURTHEST = 32, 128  # T5's: half of the buckets for a distance each, the rest up to the furthest by its log


class DistanceBias(nn.Module):
    """Learn what is added to a score for how far the source lies before the query, or after it."""

    def __init__(self, heads: int, *, both_sides: bool, buckets: int = BUCKETS, furthest: int = FURTHEST) -> None:
        super().__init__()
        self.both_sides, self.buckets, self.furthest = both_sides, buckets, furthest
        self.table = nn.Parameter(torch.zeros(buckets * (2 if both_sides else 1), heads))

    def forward(self, age_TS: Tensor) -> Tensor:
        """Give [N, T, S] for how many steps before its query each source is, negative after it."""
        away = age_TS.abs()
        exact = self.buckets // 2
        logs = torch.log(away.clamp(min=1).float() / exact) / math.log(self.furthest / exact) * (self.buckets - exact)
        buckets = torch.where(away < exact, away, (exact + logs.long()).clamp(exact, self.buckets - 1))
        if self.both_sides:
            buckets = buckets + self.buckets * (age_TS < 0)
        return self.table[buckets].movedim(-1, 0)


class DistanceAttention(nn.Module):
    """Attend from hidden states to entries, each the key and value of a source: [..., 2NA]."""

    def __init__(self, hidden: int, heads: int, width: int) -> None:
        super().__init__()
        self.heads, self.entry_size = heads, 2 * heads * width
        self.query = nn.Linear(hidden, heads * width, bias=False)
        self.key_value = nn.Linear(hidden, self.entry_size, bias=False)
        self.out = nn.Linear(heads * width, hidden, bias=False)

    def forward(self, x: Tensor, entries: Tensor, allowed: Tensor, bias: Tensor | None) -> Tensor:
        """Give [..., T, H] from x [..., T, H] and entries [..., S, 2NA].

        Args:
            x: hidden states of the queries.
            entries: what `key_value` gave of the sources.
            allowed: bool [..., T, S], True where a query may see the source.
            bias: [N, T, S], added to the scores.
        """
        queries = self.query(x).unflatten(-1, (self.heads, -1)).transpose(-2, -3)
        keys, values = (part.unflatten(-1, (self.heads, -1)).transpose(-2, -3) for part in entries.chunk(2, dim=-1))
        scores = queries @ keys.transpose(-1, -2) / math.sqrt(queries.shape[-1])
        if bias is not None:
            scores = scores + bias
        weights = torch.softmax(torch.where(allowed.unsqueeze(-3), scores, MASKED), dim=-1)
        return self.out((weights @ values).transpose(-2, -3).flatten(-2))


class Blocks:
    """Cut a sequence that follows a ring of W entries into blocks of W, each to see itself and the block before it."""

    def __init__(self, num_tokens: int, window: int, device: torch.device) -> None:
        self.num_tokens, self.window, self.padding = num_tokens, window, -num_tokens % window
        steps = torch.arange(window, device=device)
        self.age_TS = steps[:, None] + window - torch.arange(2 * window, device=device)  # [W, 2W]
        self.inside_TS = (self.age_TS >= 0) & (self.age_TS < window)

    def queries(self, x_BTH: Tensor) -> Tensor:
        """Give [B, blocks, W, H]."""
        return F.pad(x_BTH, (0, 0, 0, self.padding)).unflatten(1, (-1, self.window))

    def sources(self, entries_BSR: Tensor) -> Tensor:
        """Give [B, blocks, 2W, R] of W + T entries, the ring's first."""
        blocks = F.pad(entries_BSR, (0, 0, 0, self.padding)).unflatten(1, (-1, self.window))
        return torch.cat([blocks[:, :-1], blocks[:, 1:]], dim=2)

    def join(self, blocks: Tensor) -> Tensor:
        """Give [B, T, H] again."""
        return blocks.flatten(1, 2)[:, : self.num_tokens]
