"""Copying from memory: attention over a sequence's own past tokens that returns how those were routed.

A token is compared with the last W tokens before it; what comes back is a mixture of their routing (`now`: what such a
token used) and of the routing of the tokens that followed them (`next`: what came after such a token). Where nothing
is alike, weight goes to popularity. Knows hidden states and many-hot routing; knows no horizon.
"""

# B batch, T tokens, W window, S = tokens compared with, N heads, A width of a head, Z input, X = L*E

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .history import FLOOR

MASKED = -1e4
EMPTY = -2  # id of a place in memory that no token has taken; -1 is the unknown token


class Memory(NamedTuple):
    """The last W tokens, oldest first."""

    keys: Tensor
    """[B, W, N * A]"""
    ids: Tensor
    """int64 [B, W]; `EMPTY` where there was no token."""
    routing: Tensor
    """[B, W, X], of the tokens before those of the keys: the newest one's own routing is known to the next step."""


class Copied(NamedTuple):
    """What memory says."""

    now: Tensor
    """[..., X], logits to add for the token itself."""
    next: Tensor
    """[..., X], logits to add for the tokens after it."""
    weights: Tensor
    """[..., S], how much of `now` was copied from each past token."""


class RoutingMemory(nn.Module):
    """Attend from tokens to the W tokens before them by several heads, and copy routing from there.

    A head scores a past token by query and key, a bonus for the same id, and a penalty that grows with the logarithm
    of its age. Heads are mixed before anything is copied, by weights that depend on the token, once for `now` and
    once for `next`: memory is read once for both, 1.6 MB at W = 512 and X = 768.
    """

    def __init__(self, size: int, heads: int, width: int, window: int, entries: int) -> None:
        super().__init__()
        self.heads, self.width, self.window = heads, width, window
        self.query = nn.Linear(size, heads * width)
        self.key = nn.Linear(size, heads * width)
        self.same_N = nn.Parameter(torch.full((heads,), 2.0))
        self.age_N = nn.Parameter(torch.full((heads,), -0.5))
        self.nothing_N = nn.Parameter(torch.zeros(heads))
        self.mix = nn.Linear(size + 2 * heads, 2 * heads)
        self.trust = nn.Linear(size + 2 * heads, 2)
        self.weight_X = nn.Parameter(torch.ones(2, entries))
        self.popularity_X: Tensor
        self.register_buffer("popularity_X", torch.full((entries,), 0.5))
        for layer in (self.mix, self.trust):
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)

    def empty(self, batch: int) -> Memory:
        """Give the memory before the first token."""
        return Memory(
            self.weight_X.new_zeros(batch, self.window, self.heads * self.width),
            torch.full((batch, self.window), EMPTY, dtype=torch.int64, device=self.weight_X.device),
            self.weight_X.new_zeros(batch, self.window, self.weight_X.shape[1]),
        )

    def step(self, x_BZ: Tensor, ids_B: Tensor, previous_BX: Tensor, memory: Memory) -> tuple[Copied, Memory]:
        """Read the memory for one token whose predecessor used `previous`; give also the entry [B, ...] that the token
        and its predecessor's routing add to the memory."""
        age_W = torch.arange(self.window, 0, -1, device=x_BZ.device)
        known_B1W = (memory.ids != EMPTY)[:, None]
        weights, nothing = self._attend(x_BZ[:, None], ids_B[:, None], memory.keys, memory.ids, age_W[None], known_B1W)
        weights_BGW, trust_BG = self._mixed(x_BZ[:, None], weights, nothing, known_B1W & (age_W > 1))
        weights_BGW, trust_BG = weights_BGW[:, 0], trust_BG[:, 0]
        none = torch.zeros_like(weights_BGW[:, 0, :1])
        now_BW, next_BW = weights_BGW.unbind(1)
        older = (torch.cat([none, now_BW[:, :-1]], dim=1), torch.cat([none, none, next_BW[:, :-2]], dim=1))
        newest = (now_BW[:, -1:], next_BW[:, -2:-1])
        shares = [  # two products of one row each: onnxruntime takes four times as long over one of two rows
            (weights_BW[:, None] @ memory.routing)[:, 0] + newest_B * previous_BX
            for weights_BW, newest_B in zip(older, newest, strict=True)
        ]
        copied = self._raised(torch.stack(shares, dim=1), weights_BGW, trust_BG)
        return copied, Memory(self.key(x_BZ), ids_B, previous_BX)

    def band(self, x_BTZ: Tensor, ids_BT: Tensor, previous_BTX: Tensor, memory: Memory) -> tuple[Copied, Memory]:
        """Read the memory for every token of a sequence, what `step` gives, all at once; and give it afterwards."""
        num_tokens = ids_BT.shape[1]
        keys = torch.cat([memory.keys, self.key(x_BTZ)], dim=1)
        ids = torch.cat([memory.ids, ids_BT], dim=1)
        routing = torch.cat([memory.routing, previous_BTX], dim=1)
        last = Memory(*(value[:, num_tokens:] for value in (keys, ids, routing)))
        before = self.window
        if bool((memory.ids == EMPTY).all()):  # as in training: a sequence from its start
            keys, ids, routing, before = keys[:, self.window :], ids_BT, previous_BTX, 0
        places = torch.arange(before + num_tokens, device=x_BTZ.device)
        age_TS = before + torch.arange(num_tokens, device=x_BTZ.device)[:, None] - places
        known = (age_TS >= 1) & (age_TS <= self.window) & (ids != EMPTY)[:, None]
        weights, nothing = self._attend(x_BTZ, ids_BT, keys, ids, age_TS, known)
        weights_BTGS, trust_BTG = self._mixed(x_BTZ, weights, nothing, known & (age_TS > 1))
        now_BTS, next_BTS = weights_BTGS.unbind(2)
        shares = [now_BTS[..., :-1] @ routing[:, 1:], next_BTS[..., :-2] @ routing[:, 2:]]
        return self._raised(torch.stack(shares, dim=2), weights_BTGS, trust_BTG), last

    def _attend(
        self, x_BTZ: Tensor, ids_BT: Tensor, keys_BSA: Tensor, ids_BS: Tensor, age_TS: Tensor, known_BTS: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Give attention weights [B, N, T, S] and what is left for popularity [B, N, T]."""
        queries = (self.query(x_BTZ) / math.sqrt(self.width)).unflatten(-1, (self.heads, self.width))
        keys = keys_BSA.unflatten(-1, (self.heads, self.width))
        if x_BTZ.shape[1] == 1:  # a product would first copy the keys into another order
            scores = (keys * queries).sum(-1).transpose(1, 2)[:, :, None]
        else:
            scores = queries.transpose(1, 2) @ keys.permute(0, 2, 3, 1)
        same = ((ids_BT[:, :, None] == ids_BS[:, None]) & (ids_BS[:, None] >= 0)).to(x_BTZ.dtype)
        scores = scores + self.same_N[:, None, None] * same[:, None]
        scores = scores + self.age_N[:, None, None] * torch.log(age_TS.clamp(min=1).to(x_BTZ.dtype))
        scores = scores.masked_fill(~known_BTS[:, None], MASKED)
        top = torch.maximum(scores.amax(-1), self.nothing_N[:, None]).detach()
        weights = torch.exp(scores - top[..., None])
        nothing = torch.exp(self.nothing_N[:, None] - top)
        total = weights.sum(-1) + nothing
        return weights / total[..., None], nothing / total

    def _mixed(self, x_BTZ: Tensor, weights: Tensor, nothing: Tensor, followed_BTS: Tensor) -> tuple[Tensor, Tensor]:
        """Give weights over past tokens [B, T, 2, S] for `now` and `next`, heads mixed, and the trust in both."""
        peaks = torch.cat([nothing, weights.amax(-1)], dim=1).transpose(1, 2)
        x_BTZ = torch.cat([x_BTZ, peaks], dim=-1)
        mix_BTGN = torch.softmax(self.mix(x_BTZ).unflatten(-1, (2, self.heads)), dim=-1)
        mixed = mix_BTGN @ weights.transpose(1, 2)
        now, after = mixed.unbind(2)
        return torch.stack([now, after * followed_BTS], dim=2), F.softplus(self.trust(x_BTZ) + 1)

    def _raised(self, share: Tensor, weights: Tensor, trust: Tensor) -> Copied:
        """Turn shares [..., 2, X] into logits; popularity has what weights [..., 2, S] leave."""
        share = share + (1 - weights.sum(-1))[..., None] * self.popularity_X
        raised = torch.log((share + FLOOR) / (self.popularity_X + FLOOR))
        now, after = (raised * self.weight_X * trust[..., None]).unbind(-2)
        return Copied(now, after, weights[..., 0, :])
