"""SiDA's predictor: token embedding -> LSTM layers -> sparse attention, plus a linear path around both -> heads.

SiDA reads the model's own embeddings of an encoder's tokens; traces hold ids, so the embedding is the predictor's own,
and a skip from it to every (layer, expert) starts as a factorisation of the token table. It learns from the router's
scores where a trace has them: `distill_weight` 200 beside cross-entropy is SiDA's 0.005 of cross-entropy beside
distillation. Batch horizon for encoders and decoders, both directions for encoders (SiDA's goes forward only). Token
horizon for causal models: the same from the ids up to the token, the attention over a ring of W steps; it looks at no
routing of past tokens.
"""

# B batch, T tokens, L MoE layers, E experts, D embedding, H hidden, W window

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from ..collect.errors import SettingError
from .base import PredictorSpec
from .entmax import AttentionWeights, check_attention_weights
from .lstm import LstmLayer, LstmState
from .network import BatchNetwork, Link, Logits, Network, NetworkSettings, State, TokenNetwork
from .rows import RoutingStatistics
from .sparse_attention import SparseAttention
from .token_embedding import TokenEmbedding, factorise


@dataclass(frozen=True, kw_only=True)
class LstmSparsemaxSettings(NetworkSettings):
    """Sizes of the LSTM predictor."""

    family: ClassVar[str] = "lstm_sparsemax"

    link: Link = "softmax"
    """How logits become probabilities; sigmoid trains by binary, softmax by soft-target cross-entropy."""
    embedding: int = 192
    """Width of the token embedding."""
    hidden: int = 256
    """Width of the LSTM layers, both directions together."""
    num_layers: int = 2
    """LSTM layers."""
    attention: int = 64
    """Width of the attention's keys and values."""
    attention_weights: AttentionWeights = "sparsemax"
    """How scores become the attention's weights: sparsemax, entmax15 or softmax."""
    window: int = 32
    """Steps that the attention of the token horizon looks back."""
    dropout: float = 0.4
    """Dropout on the trunk, in training."""
    forget: float = 0.1
    """Share of token ids taken for unknown in training."""
    distill_top: int = 30
    """Experts of a layer, those that the router scored highest, whose shares are learned; 0 for none."""
    distill_weight: float = 200.0
    """Weight of that beside cross-entropy, where the trace has scores."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_sizes("embedding", "hidden", "num_layers", "attention", "window")
        if self.hidden % 2:
            raise SettingError(f"hidden must be even (two directions share it), got {self.hidden}.")
        self.require_shares("dropout", "forget")
        check_attention_weights(self.attention_weights)

    def build(self, spec: PredictorSpec, known_ids: np.ndarray) -> Network:
        """Build the network of the spec's horizon."""
        return (LstmSparsemaxToken if spec.horizon == "token" else LstmSparsemaxBatch)(spec, self, known_ids)


class _Trunk(nn.Module):
    """What lies between token and heads; the networks below choose how layers and attention are run."""

    def __init__(self, settings: LstmSparsemaxSettings, *, bidirectional: bool, window: int | None) -> None:
        super().__init__()
        width = settings.hidden // 2 if bidirectional else settings.hidden
        self.token_in = nn.Linear(settings.embedding, settings.hidden)
        self.layers = nn.ModuleList(
            LstmLayer(settings.hidden, width, bidirectional=bidirectional) for _ in range(settings.num_layers)
        )
        self.attention = SparseAttention(settings.hidden, settings.attention, window, settings.attention_weights)
        self.around = nn.Linear(settings.hidden, settings.hidden)
        self.norm = nn.LayerNorm(settings.hidden)
        self.dropout = nn.Dropout(settings.dropout)

    def enter(self, token: Tensor) -> Tensor:
        """Give what the LSTM reads of a token."""
        return self.dropout(torch.relu(self.token_in(token)))

    def leave(self, read: Tensor, hidden: Tensor, attended: Tensor) -> Tensor:
        """Give what the heads read."""
        return self.dropout(self.norm(hidden + attended + self.around(read)))


class _Ends(nn.Module):
    """Token embedding and heads, with the skip between them."""

    def __init__(self, spec: PredictorSpec, settings: LstmSparsemaxSettings, known_ids: np.ndarray) -> None:
        super().__init__()
        entries = spec.shape[0] * spec.shape[1]
        self.shape = spec.shape
        self.embedding = TokenEmbedding(spec.vocab_size, known_ids, settings.embedding)
        self.heads = nn.Linear(settings.hidden, entries)
        self.token_skip = nn.Linear(settings.embedding, entries, bias=False)

    @torch.no_grad()
    def warm_start(self, statistics: RoutingStatistics) -> None:
        """Let the skip give the token table, and the heads nothing yet."""
        bias, embedding, skip = factorise(statistics, self.embedding.table.embedding_dim)
        self.embedding.start(statistics, embedding)
        self.token_skip.weight.copy_(skip)
        self.heads.weight.zero_()
        self.heads.bias.copy_(bias)

    def logits(self, trunk: Tensor, token: Tensor) -> Tensor:
        """Give logits [..., L, E]."""
        return (self.heads(trunk) + self.token_skip(token)).unflatten(-1, self.shape)


class LstmSparsemaxBatch(BatchNetwork):
    """Predict the experts of all tokens of a sequence from all ids; a decoder's from those up to each token."""

    def __init__(self, spec: PredictorSpec, settings: LstmSparsemaxSettings, known_ids: np.ndarray) -> None:
        super().__init__(spec, settings)
        self.sizes, self.causal = settings, spec.stack != "encoder"
        self.ends = _Ends(spec, settings, known_ids)
        self.trunk = _Trunk(settings, bidirectional=not self.causal, window=None)

    def warm_start(self, statistics: RoutingStatistics) -> None:
        """Start at the token table; the trunk starts silent."""
        self.ends.warm_start(statistics)

    def forward(self, ids_BT: Tensor, mask_BT: Tensor) -> Tensor:
        """Give logits [B, T, L, E]; padding changes nothing elsewhere."""
        token = self.ends.embedding(ids_BT, self.sizes.forget if self.training else 0.0)
        read = self.trunk.enter(token)
        hidden = read.transpose(0, 1)
        for layer in self.trunk.layers:
            hidden = layer(hidden, mask_BT.transpose(0, 1))
        hidden = hidden.transpose(0, 1)
        attended = self.trunk.attention.full(hidden, mask_BT, self.causal)
        return self.ends.logits(self.trunk.leave(read, hidden, attended), token)


class LstmSparsemaxToken(TokenNetwork):
    """Predict a token's experts from the ids up to it."""

    def __init__(self, spec: PredictorSpec, settings: LstmSparsemaxSettings, known_ids: np.ndarray) -> None:
        super().__init__(spec, settings)
        self.sizes = settings
        self.ends = _Ends(spec, settings, known_ids)
        self.trunk = _Trunk(settings, bidirectional=False, window=settings.window)

    def warm_start(self, statistics: RoutingStatistics) -> None:
        """Start at the token table; the trunk starts silent."""
        self.ends.warm_start(statistics)

    def start(self, batch: int) -> State:
        """Give the state before the first token: layers and ring empty."""
        state: State = {"ring": self.trunk.attention.ring(batch)}
        for index in range(self.sizes.num_layers):
            empty = self.trunk.attention.age_W.new_zeros(batch, self.sizes.hidden)
            state |= {f"hidden_{index}": empty, f"cell_{index}": empty.clone()}
        return state

    def forward(self, ids_BT: Tensor, previous_BTLE: Tensor, state: State) -> tuple[Logits, State]:
        """Run a sequence at once: logits [B, T, L, E] and the state after its last token."""
        token = self.ends.embedding(ids_BT, self.sizes.forget if self.training else 0.0)
        after: State = {}
        read = self.trunk.enter(token)
        hidden = read.transpose(0, 1).contiguous()
        for index, layer in enumerate(self.trunk.layers):
            assert isinstance(layer, LstmLayer)
            hidden, last = layer.resume(hidden, LstmState(state[f"hidden_{index}"], state[f"cell_{index}"]))
            after |= {f"{name}_{index}": value for name, value in last._asdict().items()}
        hidden = hidden.transpose(0, 1)
        attended, after["ring"] = self.trunk.attention.band(hidden, state["ring"])
        return Logits(self.ends.logits(self.trunk.leave(read, hidden, attended), token)), after

    def step(self, ids_B: Tensor, previous_BLE: Tensor, state: State) -> tuple[Logits, State]:
        """Run one token: logits [B, L, E] and the next state."""
        token = self.ends.embedding(ids_B)
        after: State = {}
        hidden = read = self.trunk.enter(token)
        for index, layer in enumerate(self.trunk.layers):
            assert isinstance(layer, LstmLayer)
            hidden, last = layer.step(hidden, LstmState(state[f"hidden_{index}"], state[f"cell_{index}"]))
            after |= {f"{name}_{index}": value for name, value in last._asdict().items()}
        attended, after["ring"] = self.trunk.attention.step(hidden, state["ring"])
        return Logits(self.ends.logits(self.trunk.leave(read, hidden, attended), token)), after
