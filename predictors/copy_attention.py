"""The default predictor: a GRU over tokens and routing, attention that copies routing from like tokens of the sequence.

Routing of a token is three quarters a matter of the token and its place in the text: what the same or a like token used
earlier in this sequence is the best single hint, and it is worth more than any table over all sequences. Logits are a
sum of plain parts: the GRU's heads, a skip from the token embedding (which starts as a factorisation of the token
table), the sequence's decayed frequencies, and what `RoutingMemory` copies. The reuse head has the same parts, and
copies what followed like tokens.
"""

# B batch, T tokens, L MoE layers, E experts, X = L*E, D embedding, H hidden, R decay rates, W window

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..collect.errors import SettingError
from .base import Horizon, PredictorSpec
from .history import History
from .network import Logits, NetworkSettings, State, TokenNetwork
from .reuse import ReuseHead, check_discount
from .routing_memory import Memory, RoutingMemory
from .rows import RoutingStatistics
from .token_embedding import TokenEmbedding, factorise


@dataclass(frozen=True, kw_only=True)
class CopyAttentionSettings(NetworkSettings):
    """Sizes of the copying predictor."""

    family: ClassVar[str] = "copy_attention"
    learning_rate: ClassVar[float] = 3e-3
    weight_decay: ClassVar[float] = 0.02

    embedding: int = 128
    """Width of the token embedding."""
    hidden: int = 256
    """Width of the GRU."""
    heads: int = 4
    """Heads of the attention to past tokens."""
    attention: int = 48
    """Width of a head."""
    window: int = 256
    """Tokens that the attention looks back."""
    decays: tuple[float, ...] = (0.5, 0.8, 0.95, 0.99)
    """Factors per token by which the frequencies of past routing decay."""
    dropout: float = 0.2
    """Dropout on hidden states and embeddings, in training."""
    forget: float = 0.1
    """Share of token ids taken for unknown in training."""
    discount: float = 0.6
    """Discount per token of the uses that the reuse head foresees; 0 for no such head."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_sizes("embedding", "hidden", "heads", "attention")
        if self.window < 2:
            raise SettingError(f"window must be at least 2, got {self.window}.")
        if not self.decays or not all(0 < decay < 1 for decay in self.decays):
            raise SettingError(f"decays must be numbers between 0 and 1, at least one, got {self.decays}.")
        self.require_shares("dropout", "forget")
        check_discount(self.discount)

    def horizon(self, stack: str) -> Horizon:
        """Token by token, whatever the stack."""
        return "token"

    def build(self, spec: PredictorSpec, known_ids: np.ndarray) -> CopyAttention:
        """Build the network."""
        return CopyAttention(spec, self, known_ids)


class Said(NamedTuple):
    """What the network says of tokens, and what it says it from."""

    logits: Logits
    hidden: Tensor
    """[..., D + H], token and GRU."""
    weights: Tensor
    """[..., S], of the past tokens that routing was copied from."""


class CopyAttention(TokenNetwork):
    """Predict a token's experts from ids up to it and routing before it."""

    rings = tuple(f"memory_{name}" for name in Memory._fields)

    def __init__(self, spec: PredictorSpec, settings: CopyAttentionSettings, known_ids: np.ndarray) -> None:
        super().__init__(spec, settings)
        num_layers, num_experts = spec.shape
        entries, hidden = num_layers * num_experts, settings.hidden
        self.sizes = settings
        self.embedding = TokenEmbedding(spec.vocab_size, known_ids, settings.embedding)
        self.history = History(spec.shape, settings.decays)
        self.token_in = nn.Linear(settings.embedding, hidden)
        self.routing_in = nn.Linear(entries, hidden, bias=False)
        self.gru = nn.GRU(hidden, hidden, batch_first=True)
        self.norm = nn.LayerNorm(hidden)
        self.mix = nn.Linear(hidden, hidden)
        self.heads = nn.Linear(hidden, entries)
        self.token_skip = nn.Linear(settings.embedding, entries, bias=False)
        self.history_skip = nn.Parameter(torch.full((self.history.num_features, num_layers, num_experts), 0.1))
        self.memory = RoutingMemory(
            hidden + settings.embedding, settings.heads, settings.attention, settings.window, entries
        )
        self.reuse = (
            ReuseHead(hidden, settings.embedding, self.history.num_features, spec.shape) if settings.discount else None
        )

    @torch.no_grad()
    def warm_start(self, statistics: RoutingStatistics) -> None:
        """Start at the token table, corrected by frequencies and memory; the GRU starts nearly silent."""
        bias, embedding, skip = factorise(statistics, self.sizes.embedding)
        self.embedding.start(statistics, embedding)
        self.token_skip.weight.copy_(skip)
        self.heads.weight.mul_(0.1)
        self.heads.bias.copy_(bias)
        popularity_LE = torch.as_tensor(statistics.popularity_LE)
        self.history.popularity_LE.copy_(popularity_LE)
        self.memory.popularity_X.copy_(popularity_LE.flatten())
        if self.reuse is not None:
            self.reuse.warm_start(popularity_LE)

    def start(self, batch: int) -> State:
        """Give the state before the first token: frequencies at popularity, nothing in GRU and memory."""
        frequency = self.history.start(batch)
        memory = {f"memory_{name}": value for name, value in self.memory.empty(batch)._asdict().items()}
        return {"frequency": frequency, "hidden": frequency.new_zeros(batch, self.sizes.hidden), **memory}

    def _gru_in(self, token: Tensor, previous: Tensor) -> Tensor:
        return self.token_in(token) + self.routing_in(previous.flatten(-2))

    def _logits(self, hidden: Tensor, token: Tensor, features: Tensor, now: Tensor, after: Tensor) -> Logits:
        """Add up the parts; hidden [..., H], token [..., D], features [..., R + 1, L, E], copied [..., X]."""
        mixed = self._drop(F.gelu(self.mix(self.norm(hidden))))
        logits = (self.heads(mixed) + self.token_skip(token) + now).unflatten(-1, self.spec.shape)
        logits = logits + self.history.weigh(features, self.history_skip)
        if self.reuse is None:
            return Logits(logits)
        reuse = self.reuse(hidden, token, features, logits) + after.unflatten(-1, self.spec.shape)
        return Logits(logits, reuse)

    def _drop(self, value: Tensor) -> Tensor:
        return F.dropout(value, self.sizes.dropout, self.training)

    def forward(self, ids_BT: Tensor, previous_BTLE: Tensor, state: State) -> tuple[Logits, State]:
        """Run a sequence at once: logits [B, T, L, E] and the state after its last token."""
        said, after = self._run(ids_BT, previous_BTLE, state)
        return said.logits, after

    def step(self, ids_B: Tensor, previous_BLE: Tensor, state: State) -> tuple[Logits, State]:
        """Run one token: logits [B, L, E], and the next state with one entry of each ring."""
        said, after = self._step(ids_B, previous_BLE, state)
        return said.logits, after

    def _run(self, ids_BT: Tensor, previous_BTLE: Tensor, state: State) -> tuple[Said, State]:
        token = self.embedding(ids_BT, self.sizes.forget if self.training else 0.0)
        features, frequency = self.history.run(previous_BTLE, state["frequency"])
        gru_in = self._drop(self._gru_in(token, previous_BTLE))
        hidden, last = self.gru(gru_in, state["hidden"][None].contiguous())
        token, hidden = self._drop(token), self._drop(hidden)
        memory = Memory(*(state[f"memory_{name}"] for name in Memory._fields))
        read = torch.cat([token, hidden], dim=-1)
        copied, memory = self.memory.band(read, self._remembered(ids_BT), previous_BTLE.flatten(-2), memory)
        kept = {f"memory_{name}": value for name, value in memory._asdict().items()}
        logits = self._logits(hidden, token, features, copied.now, copied.next)
        return Said(logits, read, copied.weights), {"frequency": frequency, "hidden": last[0], **kept}

    def _step(self, ids_B: Tensor, previous_BLE: Tensor, state: State) -> tuple[Said, State]:
        token = self.embedding(ids_B)
        features, frequency = self.history.step(previous_BLE, state["frequency"])
        hidden = self._gru_step(self._gru_in(token, previous_BLE), state["hidden"])
        memory = Memory(*(state[f"memory_{name}"] for name in Memory._fields))
        read = torch.cat([token, hidden], dim=-1)
        copied, memory = self.memory.step(read, self._remembered(ids_B), previous_BLE.flatten(-2), memory)
        kept = {f"memory_{name}": value for name, value in memory._asdict().items()}
        logits = self._logits(hidden, token, features, copied.now, copied.next)
        return Said(logits, read, copied.weights), {"frequency": frequency, "hidden": hidden, **kept}

    def _remembered(self, ids: Tensor) -> Tensor:
        """Give the ids that tell like tokens: of unseen tokens their own, of what is no token at all -1."""
        return torch.where((ids >= 0) & (ids < self.spec.vocab_size), ids, -1)

    def _gru_step(self, x_BH: Tensor, hidden_BH: Tensor) -> Tensor:
        """Run the GRU's own cell once, in plain products that export at any batch."""
        weights = dict(self.gru.named_parameters())
        given = F.linear(x_BH, weights["weight_ih_l0"], weights["bias_ih_l0"]).chunk(3, dim=-1)
        own = F.linear(hidden_BH, weights["weight_hh_l0"], weights["bias_hh_l0"]).chunk(3, dim=-1)
        reset, update = torch.sigmoid(given[0] + own[0]), torch.sigmoid(given[1] + own[1])
        candidate = torch.tanh(given[2] + reset * own[2])
        return candidate + update * (hidden_BH - candidate)
