"""A shadow of a T5-like encoder: its own embedding, attention and gates, without its experts.

What chooses a token's experts is mostly its embedding and what attention adds to it; what the experts of the layers
before add changes little, and a small feed-forward part in place of each block's own learns to stand in for it. Each
gate reads the hidden state of its own depth, so that the first MoE layer above dense attention is foreseen all but
exactly. The idea of a light copy of the model that runs ahead of it is that of shadow-model predictors; the gates are
Mixtral-offloading's, at every depth. Batch horizon, encoders only: a decoder's attention reads what experts made.
"""

# B batch, T tokens, L MoE layers, E experts, H hidden

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from ..collect.errors import ModelError, SettingError
from .base import Horizon, PredictorSpec
from .distance_attention import DistanceAttention, DistanceBias
from .network import BatchNetwork, NetworkSettings
from .rows import RoutingStatistics
from .token_embedding import TokenEmbedding, factorise

OWN_MODEL = "give the model that the trace was recorded from."
SHARPNESS = 2.5  # log of what a gate's logits are raised by: a gate need not be sure of what it chooses, we must


@dataclass(frozen=True, kw_only=True)
class ShadowSettings(NetworkSettings):
    """Sizes of the shadow, which must be those of the model where one is given."""

    family: ClassVar[str] = "shadow"
    learning_rate: ClassVar[float] = 3e-3

    model: str | None = None
    """Model whose encoder it shadows: a mini model, a folder, or a name on the hub. What is taken from it stays as it
    is. Where not given, it starts at the token table and learns everything."""
    hidden: int = 128
    """Width of the hidden states."""
    heads: int = 4
    """Heads of each attention."""
    head_width: int = 32
    """Width of a head."""
    feed_forward: int = 256
    """Hidden units of what stands in for each block's experts or feed-forward part."""
    buckets: int = 16
    """Distances that attention tells apart on each side: half of T5's relative_attention_num_buckets."""
    furthest: int = 128
    """Distance beyond which all are alike: T5's relative_attention_max_distance."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_sizes("hidden", "heads", "head_width", "feed_forward", "buckets", "furthest")
        if self.buckets < 4 or self.buckets % 2 or self.furthest <= self.buckets // 2:
            raise SettingError(
                f"buckets must be even, at least 4, and less than twice furthest, which is {self.furthest}, got "
                f"{self.buckets}."
            )

    def horizon(self, stack: str) -> Horizon:
        """All layers of all tokens at once.

        Raises:
            SettingError: if the stack is no encoder.
        """
        if stack != "encoder":
            raise SettingError(
                f"shadow predicts encoders, got the {stack} stack; use copy_attention for a causal one, sru_attention "
                "or routing_path for a decoder."
            )
        return "batch"

    def source_model(self) -> str | None:
        """Name the model that it starts from."""
        return self.model

    def build(self, spec: PredictorSpec, known_ids: np.ndarray) -> Shadow:
        """Build the network; with a model it knows all its token ids."""
        return Shadow(spec, self, known_ids if self.model is None else np.arange(spec.vocab_size))


class _StandIn(nn.Module):
    """Stand in for what a block adds after its attention: for experts also by a vector of each, weighed by the gate."""

    def __init__(self, settings: ShadowSettings, num_experts: int) -> None:
        super().__init__()
        self.wide = nn.Linear(settings.hidden, settings.feed_forward)
        self.narrow = nn.Linear(settings.feed_forward, settings.hidden, bias=False)
        self.experts = nn.Linear(num_experts, settings.hidden, bias=False) if num_experts else None
        for part in (self.narrow, self.experts):
            if part is not None:
                nn.init.zeros_(part.weight)

    def forward(self, normed: Tensor, logits: Tensor | None) -> Tensor:
        """Give what is added to hidden states [..., H]; logits [..., E] are the gate's."""
        added = self.narrow(torch.relu(self.wide(normed)))
        return added if self.experts is None or logits is None else added + self.experts(logits.softmax(-1))


class _Block(nn.Module):
    """Attention, then a gate where the block has experts, then the stand-in; the last block needs none."""

    def __init__(self, settings: ShadowSettings, num_experts: int, *, last: bool) -> None:
        super().__init__()
        self.before = nn.RMSNorm(settings.hidden, eps=1e-6)
        self.after = nn.RMSNorm(settings.hidden, eps=1e-6)
        self.attention = DistanceAttention(settings.hidden, settings.heads, settings.head_width)
        self.gate = nn.Linear(settings.hidden, num_experts) if num_experts else None
        self.sharpness = nn.Parameter(torch.tensor(SHARPNESS)) if num_experts else None
        self.stand_in = None if last else _StandIn(settings, num_experts)

    def forward(self, x: Tensor, allowed: Tensor, bias: Tensor) -> tuple[Tensor, Tensor | None]:
        """Give the hidden states after the block, and its gate's logits."""
        read = self.before(x)
        x = x + self.attention(read, self.attention.key_value(read), allowed, bias)
        normed = self.after(x)
        logits = None if self.gate is None else self.gate(normed)
        x = x if self.stand_in is None else x + self.stand_in(normed, logits)
        return x, None if logits is None or self.sharpness is None else logits * torch.exp(self.sharpness)


class Shadow(BatchNetwork):
    """Predict the experts of an encoder's tokens from all ids."""

    def __init__(self, spec: PredictorSpec, settings: ShadowSettings, known_ids: np.ndarray) -> None:
        super().__init__(spec, settings)
        self.sizes = settings
        experts = {layer.block: layer.num_experts for layer in (spec.topology.layers[index] for index in spec.layers)}
        self.embedding = TokenEmbedding(spec.vocab_size, known_ids, settings.hidden)
        self.bias = DistanceBias(settings.heads, both_sides=True, buckets=settings.buckets, furthest=settings.furthest)
        count = max(experts) + 1
        self.blocks = nn.ModuleList(
            _Block(settings, experts.get(block, 0), last=block == count - 1) for block in range(count)
        )
        if settings.model is not None:  # wherever the weights come from: the model, a bundle or a checkpoint
            for name, parameter in self.named_parameters():
                parameter.requires_grad_("stand_in" in name or "sharpness" in name)

    def _blocks(self) -> list[_Block]:
        return [block for block in self.blocks if isinstance(block, _Block)]

    @torch.no_grad()
    def warm_start(self, statistics: RoutingStatistics) -> None:
        """Start near the token table: attention adds nothing yet."""
        bias_X, embedding, skip = factorise(statistics, self.sizes.hidden)
        self.embedding.start(statistics, embedding)
        gates = [block.gate for block in self._blocks() if block.gate is not None]
        parts = zip(gates, bias_X.unflatten(0, self.spec.shape), skip.unflatten(0, self.spec.shape), strict=True)
        for gate, bias_E, skip_ED in parts:
            gate.weight.copy_(skip_ED[: gate.out_features])
            gate.bias.copy_(bias_E[: gate.out_features])
        for block in self._blocks():
            block.attention.out.weight.zero_()

    @torch.no_grad()
    def start_from_model(self, model: Any) -> None:
        """Copy embedding, attention, norms and gates of a model's encoder.

        Raises:
            ModelError: if the model has no T5-like encoder with these MoE layers.
            SettingError: if the sizes are not the model's.
        """
        encoder = getattr(model, "encoder", None) or getattr(getattr(model, "model", None), "encoder", None)
        config = model.config
        if encoder is None or not hasattr(encoder, "block") or not hasattr(config, "relative_attention_num_buckets"):
            raise ModelError(
                f"{type(model).__name__} has no encoder of T5's kind, which shadow copies; leave --model.network.model "
                "out, or use routing_path."
            )
        wanted = {
            "hidden": config.d_model,
            "heads": config.num_heads,
            "head_width": config.d_kv,
            "buckets": config.relative_attention_num_buckets // 2,
            "furthest": config.relative_attention_max_distance,
        }
        for name, value in wanted.items():
            if getattr(self.sizes, name) != value:
                raise SettingError(f"{name} must be {value}, as in the model, got {getattr(self.sizes, name)}.")
        table = encoder.embed_tokens.weight
        if len(table) < self.spec.vocab_size:
            raise ModelError(
                f"The model knows {len(table)} token ids and the trace {self.spec.vocab_size}; {OWN_MODEL}"
            )
        unknown = table.new_zeros(1, self.sizes.hidden)
        self.embedding.table.weight.copy_(torch.cat([table[: self.spec.vocab_size], unknown]))
        own = [block.layer for block in encoder.block[: len(self.blocks)]]
        if len(own) < len(self.blocks):
            raise ModelError(
                f"The model's encoder has {len(own)} blocks, and the trace has experts in block "
                f"{len(self.blocks) - 1}; {OWN_MODEL}"
            )
        self.bias.table.copy_(own[0][0].SelfAttention.relative_attention_bias.weight)
        for mine, (attention, *_, last) in zip(self._blocks(), own, strict=True):
            heads = attention.SelfAttention
            mine.before.weight.copy_(attention.layer_norm.weight)
            mine.after.weight.copy_(last.layer_norm.weight)
            mine.attention.query.weight.copy_(heads.q.weight * math.sqrt(self.sizes.head_width))  # T5 scales no scores
            mine.attention.key_value.weight.copy_(torch.cat([heads.k.weight, heads.v.weight]))
            mine.attention.out.weight.copy_(heads.o.weight)
            if mine.gate is not None:
                gate = _gate(last.mlp, mine.gate.out_features)
                mine.gate.weight.copy_(gate.weight)
                mine.gate.bias.copy_(torch.zeros_like(mine.gate.bias) if gate.bias is None else gate.bias)

    def forward(self, ids_BT: Tensor, mask_BT: Tensor) -> Tensor:
        """Give logits [B, T, L, E]; padding changes nothing elsewhere."""
        steps = torch.arange(ids_BT.shape[1], device=ids_BT.device)
        bias, allowed = self.bias(steps[:, None] - steps), mask_BT[:, None, :]
        x, found = self.embedding(ids_BT), []
        for block in self._blocks():
            x, logits = block(x, allowed, bias)
            if logits is not None:
                found.append(nn.functional.pad(logits, (0, self.spec.shape[1] - logits.shape[-1])))
        return torch.stack(found, dim=-2)


def _gate(mlp: Any, num_experts: int) -> Any:
    """Give the gate of a block of the model.

    Raises:
        ModelError: if the block has none, or of another size.
    """
    gate = getattr(getattr(mlp, "router", None), "classifier", None)
    if gate is None or gate.out_features != num_experts:
        raise ModelError(f"The model has no gate of {num_experts} experts where the trace has one; {OWN_MODEL}")
    return gate
