"""ExpertFlow's routing-path predictor: a narrow T5-like transformer reads token ids and names all experts in one pass.

An encoder reads the tokens, a decoder reads them again beside it, and one head per MoE layer says which of its experts
the token uses: multi-label, by binary cross-entropy. The paper gives widths and 7.21 MB; 3 + 2 layers come nearest to
it (7.1 MB with T5's 32,128 tokens and 12 layers of 128 experts). Ours starts at the token table, which the paper's does
not. Batch horizon for encoders and decoders. Causal models have the token horizon: nothing sees a later token, and each
attention looks back over a ring of W steps.
"""

# B batch, T tokens, L MoE layers, E experts, H hidden, W window, R numbers of a ring's entry

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from ..collect.errors import SettingError
from .base import PredictorSpec
from .distance_attention import Blocks, DistanceAttention, DistanceBias
from .network import BatchNetwork, Logits, Network, NetworkSettings, State, TokenNetwork
from .rows import RoutingStatistics
from .token_embedding import TokenEmbedding, factorise

Attend = Callable[[DistanceAttention, Tensor, Tensor, DistanceBias | None], Tensor]  # queries, sources, bias of a layer


@dataclass(frozen=True, kw_only=True)
class RoutingPathSettings(NetworkSettings):
    """Sizes of the transformer."""

    family: ClassVar[str] = "routing_path"

    hidden: int = 32
    """Width of embedding and hidden states."""
    feed_forward: int = 2048
    """Hidden units between the attentions."""
    encoder_layers: int = 3
    """Layers that read the tokens first."""
    decoder_layers: int = 2
    """Layers that read them again, beside the encoder."""
    heads: int = 4
    """Heads of each attention."""
    window: int = 128
    """Steps that each attention of the token horizon looks back."""
    dropout: float = 0.1
    """Dropout on what each part adds, in training."""
    forget: float = 0.1
    """Share of token ids taken for unknown in training."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_sizes("hidden", "feed_forward", "encoder_layers", "decoder_layers", "heads", "window")
        if self.hidden % self.heads:
            raise SettingError(f"heads must divide hidden, which is {self.hidden}, got {self.heads}.")
        self.require_shares("dropout", "forget")

    def build(self, spec: PredictorSpec, known_ids: np.ndarray) -> Network:
        """Build the network of the spec's horizon."""
        return (RoutingPathToken if spec.horizon == "token" else RoutingPathBatch)(spec, self, known_ids)


class _Norm(nn.Module):
    """Scale to a root mean square of 1, as T5 does: no mean, no shift."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight


class _Layer(nn.Module):
    """Attention to the own sequence, in a decoder also to the encoder's, and a feed-forward part."""

    def __init__(self, settings: RoutingPathSettings, *, decoder: bool) -> None:
        super().__init__()
        hidden = settings.hidden
        attentions = [DistanceAttention(hidden, settings.heads, hidden // settings.heads) for _ in range(1 + decoder)]
        self.attentions = nn.ModuleList(attentions)
        self.wide = nn.Linear(hidden, settings.feed_forward, bias=False)
        self.narrow = nn.Linear(settings.feed_forward, hidden, bias=False)
        self.norms = nn.ModuleList(_Norm(hidden) for _ in range(2 + decoder))
        self.dropout = nn.Dropout(settings.dropout)

    def forward(self, x: Tensor, read: Tensor | None, bias: DistanceBias, attend: Attend) -> Tensor:
        """Give the hidden states after this layer; `read` is what the encoder said."""
        sources = [None] if read is None else [None, read]
        for attention, norm, source in zip(self.attentions, self.norms, sources, strict=False):
            assert isinstance(attention, DistanceAttention)
            own = norm(x)
            added = attend(attention, own, own, bias) if source is None else attend(attention, own, source, None)
            x = x + self.dropout(added)
        return x + self.dropout(self.narrow(torch.relu(self.wide(self.norms[-1](x)))))


class _Transformer(nn.Module):
    """Encoder and decoder between token embedding and heads; `attend` chooses what a token may see."""

    def __init__(
        self, spec: PredictorSpec, settings: RoutingPathSettings, known_ids: np.ndarray, *, both_sides: bool
    ) -> None:
        super().__init__()
        self.shape = spec.shape
        self.embedding = TokenEmbedding(spec.vocab_size, known_ids, settings.hidden)
        self.encoder = nn.ModuleList(_Layer(settings, decoder=False) for _ in range(settings.encoder_layers))
        self.decoder = nn.ModuleList(_Layer(settings, decoder=True) for _ in range(settings.decoder_layers))
        self.biases = nn.ModuleList(DistanceBias(settings.heads, both_sides=both_sides) for _ in range(2))
        self.norms = nn.ModuleList(_Norm(settings.hidden) for _ in range(2))
        self.heads = nn.Linear(settings.hidden, spec.shape[0] * spec.shape[1])

    @property
    def attentions(self) -> list[DistanceAttention]:
        """All attentions, in the order in which they attend."""
        return [part for part in self.modules() if isinstance(part, DistanceAttention)]

    @torch.no_grad()
    def warm_start(self, statistics: RoutingStatistics) -> None:
        """Start near the token table; attention and feed-forward parts add nothing yet."""
        bias, embedding, skip = factorise(statistics, self.embedding.table.embedding_dim)
        self.embedding.start(statistics, embedding)
        self.heads.weight.copy_(skip)
        self.heads.bias.copy_(bias)
        for attention in self.attentions:
            attention.out.weight.zero_()
        for layer in [*self.encoder, *self.decoder]:
            assert isinstance(layer, _Layer)
            layer.narrow.weight.zero_()

    def forward(self, ids: Tensor, forget: float, attend: Attend) -> Tensor:
        """Give logits [..., L, E] of ids [...]."""
        token = self.embedding(ids, forget)
        read = token
        for layer in self.encoder:
            read = layer(read, None, self.biases[0], attend)
        read, hidden = self.norms[0](read), token
        for layer in self.decoder:
            hidden = layer(hidden, read, self.biases[1], attend)
        return self.heads(self.norms[1](hidden)).unflatten(-1, self.shape)


class RoutingPathBatch(BatchNetwork):
    """Predict the experts of all tokens of a sequence from all ids; a decoder's from those up to each token."""

    def __init__(self, spec: PredictorSpec, settings: RoutingPathSettings, known_ids: np.ndarray) -> None:
        super().__init__(spec, settings)
        self.sizes, self.causal = settings, spec.stack != "encoder"
        self.transformer = _Transformer(spec, settings, known_ids, both_sides=not self.causal)

    def warm_start(self, statistics: RoutingStatistics) -> None:
        """Start near the token table."""
        self.transformer.warm_start(statistics)

    def forward(self, ids_BT: Tensor, mask_BT: Tensor) -> Tensor:
        """Give logits [B, T, L, E]; padding changes nothing elsewhere."""
        steps = torch.arange(ids_BT.shape[1], device=ids_BT.device)
        age_TT = steps[:, None] - steps
        allowed = mask_BT[:, None, :]
        if self.causal:
            allowed = allowed & (age_TT >= 0)

        def attend(attention: DistanceAttention, x: Tensor, source: Tensor, bias: DistanceBias | None) -> Tensor:
            return attention(x, attention.key_value(source), allowed, None if bias is None else bias(age_TT))

        return self.transformer(ids_BT, self.sizes.forget if self.training else 0.0, attend)


class RoutingPathToken(TokenNetwork):
    """Predict a token's experts from the ids up to it, W steps back in each layer."""

    rings: ClassVar[tuple[str, ...]] = ("seen",)

    def __init__(self, spec: PredictorSpec, settings: RoutingPathSettings, known_ids: np.ndarray) -> None:
        super().__init__(spec, settings)
        self.sizes = settings
        self.transformer = _Transformer(spec, settings, known_ids, both_sides=False)

    def warm_start(self, statistics: RoutingStatistics) -> None:
        """Start near the token table."""
        self.transformer.warm_start(statistics)

    def start(self, batch: int) -> State:
        """Give the state before the first token: for each step of the window the entries of all attentions in their
        order, and a 1 where there was a step."""
        size = sum(attention.entry_size for attention in self.transformer.attentions) + 1
        return {"seen": self.transformer.heads.weight.new_zeros(batch, self.sizes.window, size)}

    def forward(self, ids_BT: Tensor, previous_BTLE: Tensor, state: State) -> tuple[Logits, State]:
        """Run a sequence at once: logits [B, T, L, E] and the state after its last token."""
        blocks = Blocks(ids_BT.shape[1], self.sizes.window, ids_BT.device)
        seen, new = _Reader(state["seen"]), []
        real = torch.cat([seen.written, torch.ones_like(ids_BT, dtype=seen.written.dtype)[..., None]], dim=1)
        allowed = blocks.inside_TS & (blocks.sources(real)[..., 0] > 0)[:, :, None]

        def attend(attention: DistanceAttention, x: Tensor, source: Tensor, bias: DistanceBias | None) -> Tensor:
            new.append(attention.key_value(source))
            entries = torch.cat([seen.next(attention.entry_size), new[-1]], dim=1)
            added = None if bias is None else bias(blocks.age_TS)
            return blocks.join(attention(blocks.queries(x), blocks.sources(entries), allowed, added))

        logits = self.transformer(ids_BT, self.sizes.forget if self.training else 0.0, attend)
        latest = torch.cat([*new, torch.ones_like(new[0][..., :1])], dim=-1)
        return Logits(logits), {"seen": torch.cat([state["seen"], latest], dim=1)[:, -self.sizes.window :]}

    def step(self, ids_B: Tensor, previous_BLE: Tensor, state: State) -> tuple[Logits, State]:
        """Run one token: logits [B, L, E] and the newest entry of the state."""
        seen, new = _Reader(state["seen"][:, 1:]), []
        age_1W = torch.arange(self.sizes.window - 1, -1, -1, device=ids_B.device)[None]
        allowed = (torch.cat([seen.written, torch.ones_like(state["seen"][:, :1, -1:])], dim=1) > 0).transpose(1, 2)

        def attend(attention: DistanceAttention, x: Tensor, source: Tensor, bias: DistanceBias | None) -> Tensor:
            new.append(attention.key_value(source))
            entries = torch.cat([seen.next(attention.entry_size), new[-1]], dim=1)
            return attention(x, entries, allowed, None if bias is None else bias(age_1W))

        logits = self.transformer(ids_B[:, None], 0.0, attend)
        return Logits(logits[:, 0]), {"seen": torch.cat([*new, torch.ones_like(new[0][..., :1])], dim=-1)[:, 0]}


class _Reader:
    """Read a ring attention by attention, in the order in which they attend."""

    def __init__(self, seen_BWR: Tensor) -> None:
        self.seen, self.written, self.place = seen_BWR, seen_BWR[..., -1:], 0

    def next(self, size: int) -> Tensor:
        """Give the entries of the next attention."""
        self.place += size
        return self.seen[..., self.place - size : self.place]
