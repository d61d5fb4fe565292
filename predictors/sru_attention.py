"""MoE-MPMC's predictor: token embedding -> SRU layers -> sparse attention -> one head per MoE layer.

Token horizon (causal models): the trunk also reads the previous token's routing and decayed frequencies of past
routing, kept as state; attention looks back over a ring of W steps. Batch horizon (encoders, decoders): ids only,
attention over the whole sequence; encoders run both directions. In both, the token embedding (and the frequencies)
reach every (layer, expert) by a skip connection, which starts as a factorisation of the token table.
"""

# B batch, T tokens, L MoE layers, E experts, X = L*E, D embedding, H hidden, R decay rates, W window

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from ..collect.errors import SettingError
from .base import PredictorSpec
from .entmax import AttentionWeights, check_attention_weights
from .history import History
from .network import BatchNetwork, Logits, Network, NetworkSettings, State, TokenNetwork
from .reuse import ReuseHead, check_discount
from .rows import RoutingStatistics
from .sparse_attention import SparseAttention
from .sru import SruLayer
from .token_embedding import TokenEmbedding, factorise


@dataclass(frozen=True, kw_only=True)
class SruAttentionSettings(NetworkSettings):
    """Sizes of the SRU predictor."""

    family: ClassVar[str] = "sru_attention"

    embedding: int = 192
    """Width of the token embedding."""
    hidden: int = 256
    """Width of the SRU layers, both directions together."""
    num_layers: int = 2
    """SRU layers."""
    attention: int = 64
    """Width of the attention's keys and values."""
    attention_weights: AttentionWeights = "sparsemax"
    """How scores become the attention's weights: sparsemax, entmax15 or softmax."""
    window: int = 32
    """Steps that the attention of the token horizon looks back."""
    decays: tuple[float, ...] = (0.8, 0.98)
    """Factors per token by which the frequencies of past routing decay (token horizon)."""
    dropout: float = 0.4
    """Dropout on the trunk, in training."""
    forget: float = 0.1
    """Share of token ids taken for unknown in training."""
    discount: float = 0.0
    """Discount per token of the uses that a reuse head foresees (token horizon); 0 for no such head."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_sizes("embedding", "hidden", "num_layers", "attention", "window")
        if self.hidden % 2:
            raise SettingError(f"hidden must be even (two directions share it), got {self.hidden}.")
        if not self.decays or not all(0 < decay < 1 for decay in self.decays):
            raise SettingError(f"decays must be numbers between 0 and 1, at least one, got {self.decays}.")
        self.require_shares("dropout", "forget")
        check_attention_weights(self.attention_weights)
        check_discount(self.discount)

    def build(self, spec: PredictorSpec, known_ids: np.ndarray) -> Network:
        """Build the network of the spec's horizon."""
        return (SruAttentionToken if spec.horizon == "token" else SruAttentionBatch)(spec, self, known_ids)


class _Trunk(nn.Module):
    """SRU layers, each normalised at its input, then sparse attention added to their output."""

    def __init__(self, settings: SruAttentionSettings, *, bidirectional: bool, window: int | None) -> None:
        super().__init__()
        hidden = settings.hidden // 2 if bidirectional else settings.hidden
        self.layers = nn.ModuleList(
            SruLayer(settings.hidden, hidden, bidirectional=bidirectional) for _ in range(settings.num_layers)
        )
        self.attention = SparseAttention(settings.hidden, settings.attention, window, settings.attention_weights)
        self.norm = nn.LayerNorm(settings.hidden)
        self.dropout = nn.Dropout(settings.dropout)


class SruAttentionToken(TokenNetwork):
    """Predict a token's experts from ids up to it and routing before it."""

    def __init__(self, spec: PredictorSpec, settings: SruAttentionSettings, known_ids: np.ndarray) -> None:
        super().__init__(spec, settings)
        num_layers, num_experts = spec.shape
        entries = num_layers * num_experts
        self.sizes = settings
        self.embedding = TokenEmbedding(spec.vocab_size, known_ids, settings.embedding)
        self.token_in = nn.Linear(settings.embedding, settings.hidden)
        self.routing_in = nn.Linear(entries, settings.hidden, bias=False)
        self.frequency_in = nn.Linear(entries * len(settings.decays), settings.hidden, bias=False)
        self.trunk = _Trunk(settings, bidirectional=False, window=settings.window)
        self.heads = nn.Linear(settings.hidden, entries)
        self.token_skip = nn.Linear(settings.embedding, entries, bias=False)
        self.history = History(spec.shape, settings.decays)
        self.history_skip = nn.Parameter(torch.zeros(self.history.num_features, num_layers, num_experts))
        self.reuse = (
            ReuseHead(settings.hidden, settings.embedding, self.history.num_features, spec.shape)
            if settings.discount
            else None
        )

    @torch.no_grad()
    def warm_start(self, statistics: RoutingStatistics) -> None:
        """Start at the token table, corrected by the slowest frequency; the trunk starts silent."""
        _start_at_token_table(self, statistics)
        self.history.popularity_LE.copy_(torch.as_tensor(statistics.popularity_LE))
        self.history_skip.fill_(0.3)
        if self.reuse is not None:
            self.reuse.warm_start(self.history.popularity_LE)

    def start(self, batch: int) -> State:
        """Give the state before the first token: frequencies at popularity, cells and ring empty."""
        frequency = self.history.start(batch)
        cells = {f"cell_{i}": frequency.new_zeros(batch, self.sizes.hidden) for i in range(self.sizes.num_layers)}
        return {"frequency": frequency, **cells, "ring": self.trunk.attention.ring(batch)}

    def _trunk_in(self, token: Tensor, previous: Tensor, features: Tensor) -> Tensor:
        return (
            self.token_in(token)
            + self.routing_in(previous.flatten(-2))
            + self.frequency_in(features[..., 1:, :, :].flatten(-3))
        )

    def _logits(self, trunk: Tensor, token: Tensor, features: Tensor) -> Logits:
        logits = (self.heads(trunk) + self.token_skip(token)).unflatten(-1, self.spec.shape)
        logits = logits + self.history.weigh(features, self.history_skip)
        return Logits(logits, None if self.reuse is None else self.reuse(trunk, token, features, logits))

    def forward(self, ids_BT: Tensor, previous_BTLE: Tensor, state: State) -> tuple[Logits, State]:
        """Run a sequence at once: logits [B, T, L, E] and the state after its last token."""
        token = self.embedding(ids_BT, self.sizes.forget if self.training else 0.0)
        next_state: State = {}
        features, next_state["frequency"] = self.history.run(previous_BTLE, state["frequency"])
        hidden = self.trunk.dropout(self._trunk_in(token, previous_BTLE, features)).transpose(0, 1).contiguous()
        for index, layer in enumerate(self.trunk.layers):
            hidden, next_state[f"cell_{index}"] = layer(hidden, state[f"cell_{index}"])
        hidden = hidden.transpose(0, 1)
        attended, next_state["ring"] = self.trunk.attention.band(hidden, state["ring"])
        trunk = self.trunk.dropout(self.trunk.norm(hidden + attended))
        return self._logits(trunk, token, features), next_state

    def step(self, ids_B: Tensor, previous_BLE: Tensor, state: State) -> tuple[Logits, State]:
        """Run one token: logits [B, L, E] and the next state."""
        token = self.embedding(ids_B)
        next_state: State = {}
        features, next_state["frequency"] = self.history.step(previous_BLE, state["frequency"])
        hidden = self._trunk_in(token, previous_BLE, features)
        for index, layer in enumerate(self.trunk.layers):
            assert isinstance(layer, SruLayer)
            hidden, next_state[f"cell_{index}"] = layer.step(hidden, state[f"cell_{index}"])
        attended, next_state["ring"] = self.trunk.attention.step(hidden, state["ring"])
        return self._logits(self.trunk.norm(hidden + attended), token, features), next_state


class SruAttentionBatch(BatchNetwork):
    """Predict the experts of all tokens of a sequence from all ids."""

    def __init__(self, spec: PredictorSpec, settings: SruAttentionSettings, known_ids: np.ndarray) -> None:
        super().__init__(spec, settings)
        num_layers, num_experts = spec.shape
        self.sizes, self.causal = settings, spec.stack != "encoder"
        self.embedding = TokenEmbedding(spec.vocab_size, known_ids, settings.embedding)
        self.token_in = nn.Linear(settings.embedding, settings.hidden)
        self.trunk = _Trunk(settings, bidirectional=not self.causal, window=None)
        self.heads = nn.Linear(settings.hidden, num_layers * num_experts)
        self.token_skip = nn.Linear(settings.embedding, num_layers * num_experts, bias=False)

    @torch.no_grad()
    def warm_start(self, statistics: RoutingStatistics) -> None:
        """Start at the token table; the trunk starts silent."""
        _start_at_token_table(self, statistics)

    def forward(self, ids_BT: Tensor, mask_BT: Tensor) -> Tensor:
        """Give logits [B, T, L, E]; padding changes nothing elsewhere."""
        token = self.embedding(ids_BT, self.sizes.forget if self.training else 0.0)
        hidden = self.trunk.dropout(self.token_in(token)).transpose(0, 1)
        for layer in self.trunk.layers:
            hidden, _ = layer(hidden, None, mask_BT.transpose(0, 1))
        hidden = hidden.transpose(0, 1)
        hidden = hidden + self.trunk.attention.full(hidden, mask_BT, self.causal)
        logits = self.heads(self.trunk.dropout(self.trunk.norm(hidden))) + self.token_skip(token)
        return logits.unflatten(-1, self.spec.shape)


def _start_at_token_table(network: SruAttentionToken | SruAttentionBatch, statistics: RoutingStatistics) -> None:
    """Let the skip from the token embedding give the token table, and the heads nothing yet."""
    bias, embedding, skip = factorise(statistics, network.sizes.embedding)
    network.embedding.start(statistics, embedding)
    network.token_skip.weight.copy_(skip)
    network.heads.weight.zero_()
    network.heads.bias.copy_(bias)
