"""The copying predictor, gone on with layer by layer: a token's layers ahead, also from its true experts so far.

Three parts are added to what `copy_attention` says before the token: a linear map from every expert used so far to
every expert ahead (a layer-pair table over all pairs of layers, learned together), a small network per layer over the
sum of embeddings of the experts used so far, and copying from the past tokens whose routing in the layers so far was
the same, which sharpens layer by layer.
"""

# B batch, T tokens, L MoE layers, E experts, X = L*E, W window, S past tokens, Q width of the network over layers

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .base import Horizon, PredictorSpec
from .copy_attention import CopyAttention, CopyAttentionSettings, Said
from .history import FLOOR
from .network import LayerNetwork, Logits, State

LEAST = 1e-4  # weight of a past token below which it is as good as none


@dataclass(frozen=True, kw_only=True)
class CopyLayersSettings(CopyAttentionSettings):
    """Sizes of the copying predictor of the layer horizon."""

    family: ClassVar[str] = "copy_layers"
    learning_rate: ClassVar[float] = 3e-3
    weight_decay: ClassVar[float] = 0.02

    layer_width: int = 128
    """Width of the network over a token's layers."""
    reach: int = 2
    """Layers ahead."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_sizes("layer_width", "reach")

    def horizon(self, stack: str) -> Horizon:
        """Layers ahead, whatever the stack."""
        return "layer"

    def build(self, spec: PredictorSpec, known_ids: np.ndarray) -> CopyLayers:
        """Build the network."""
        return CopyLayers(spec, self, known_ids)


class CopyLayers(CopyAttention, LayerNetwork):
    """Predict the layers ahead of a token from its true experts so far."""

    context = ("said_routing", "said_hidden", "said_weights", "memory_routing")

    def __init__(self, spec: PredictorSpec, settings: CopyLayersSettings, known_ids: np.ndarray) -> None:
        super().__init__(spec, settings, known_ids)
        num_layers, num_experts = spec.shape
        entries, width = num_layers * num_experts, settings.layer_width
        self.layer_sizes = settings
        self.pairs = nn.Parameter(torch.zeros(num_layers, entries, num_experts))
        self.used_in = nn.Parameter(torch.randn(entries, width) / width**0.5)
        self.hidden_in = nn.Linear(settings.hidden + settings.embedding, width)
        self.layer_in = nn.Parameter(torch.zeros(num_layers, width))
        self.layer_heads = nn.Parameter(torch.zeros(num_layers, width, num_experts))
        self.alike_L = nn.Parameter(torch.full((num_layers,), 4.0))
        self.forget_layers = nn.Parameter(torch.tensor(1.0))
        self.before = nn.Parameter(torch.tensor(0.5))
        self.nothing_L = nn.Parameter(torch.zeros(num_layers))
        self.copied_LE = nn.Parameter(torch.full((num_layers, num_experts), 0.5))

    def start(self, batch: int) -> State:
        """Give the state before the first token; `said_*` is what the last step said, for the layers of its token."""
        state = super().start(batch)
        zeros = state["hidden"].new_zeros
        said = {
            "said_routing": zeros(batch, *self.spec.shape),
            "said_hidden": zeros(batch, self.sizes.hidden + self.sizes.embedding),
            "said_weights": zeros(batch, self.sizes.window),
        }
        return state | said

    def step(self, ids_B: Tensor, previous_BLE: Tensor, state: State) -> tuple[Logits, State]:
        """Run one token: logits [B, L, E], and the next state with one entry of each ring."""
        said, after = self._step(ids_B, previous_BLE, state)
        return said.logits, after | _named(said)

    def forward(self, ids_BT: Tensor, previous_BTLE: Tensor, state: State) -> tuple[Logits, State]:
        """Run a sequence at once: logits [B, T, L, E] and the state after its last token."""
        said, after = self._run(ids_BT, previous_BTLE, state)
        last = {name: value[:, -1] for name, value in _named(said).items()}
        weights = last["said_weights"]  # over the window and the sequence itself; its last token reads the last W
        weights = F.pad(weights, (max(0, self.sizes.window + 1 - weights.shape[1]), 0))
        last["said_weights"] = weights[:, -self.sizes.window - 1 : -1]
        return said.logits, after | last

    def layers(
        self, ids_BT: Tensor, previous_BTLE: Tensor, used_BTLE: Tensor, state: State, stride: int
    ) -> tuple[Logits, Tensor, State]:
        """Run a sequence and give also logits [B, T, L, E] whose row l is from rows up to l - stride of `used`."""
        said, after = self._run(ids_BT, previous_BTLE, state)
        past_BSLE = torch.cat([state["memory_routing"].unflatten(-1, self.spec.shape), previous_BTLE], dim=1)
        num_past = said.weights.shape[-1]
        # Row s of the weights is the token whose routing stands one place later: it is `previous` of the next token.
        past_BSLE = F.pad(past_BSLE[:, past_BSLE.shape[1] - num_past :], (0, 0, 0, 0, 0, 1))[:, 1:]
        rows = torch.arange(self.spec.shape[0], device=used_BTLE.device)
        known_LL = (rows[:, None] - rows >= stride).to(used_BTLE.dtype)  # [row ahead, row known]
        linear = self._linear(used_BTLE, known_LL)
        deep = self._deep(used_BTLE, said.hidden, known_LL)
        copied = self._copied(used_BTLE, past_BSLE, said.weights, known_LL)
        return said.logits, said.logits.routing + linear + deep + copied, after

    def ahead(self, layer: Tensor, used_BLE: Tensor, context: State) -> Tensor:
        """Give logits [B, L, E] of the rows ahead of `layer`, whose experts are in `used` up to it."""
        rows = torch.arange(self.spec.shape[0], device=used_BLE.device)
        known_LL = (rows <= layer).to(used_BLE.dtype).expand(len(rows), -1)
        used = used_BLE[:, None]
        past = context["memory_routing"].unflatten(-1, self.spec.shape)
        weights = context["said_weights"][:, None]
        copied = self._copied(used, past, weights, known_LL)
        deep = self._deep(used, context["said_hidden"][:, None], known_LL)
        return context["said_routing"] + (self._linear(used, known_LL) + deep + copied)[:, 0]

    def _linear(self, used_BTLE: Tensor, known_LL: Tensor) -> Tensor:
        """Map every expert used in a known row to every expert ahead."""
        num_experts = self.spec.shape[1]
        pairs = self.pairs * known_LL.repeat_interleave(num_experts, dim=1)[..., None]
        return (used_BTLE.flatten(-2) @ pairs.transpose(0, 1).flatten(1)).unflatten(-1, self.spec.shape)

    def _deep(self, used_BTLE: Tensor, hidden_BTZ: Tensor, known_LL: Tensor) -> Tensor:
        """Run a network of each row's own over the embeddings of the experts of its known rows."""
        embedded_BTLQ = torch.einsum("btle,leq->btlq", used_BTLE, self.used_in.unflatten(0, self.spec.shape))
        summed_BTLQ = known_LL @ embedded_BTLQ
        inner = F.gelu(summed_BTLQ + self.hidden_in(hidden_BTZ)[..., None, :] + self.layer_in)
        inner = self._drop(inner)
        return torch.einsum("btlq,lqe->btle", inner, self.layer_heads)

    def _copied(self, used_BTLE: Tensor, past_BSLE: Tensor, weights_BTS: Tensor, known_LL: Tensor) -> Tensor:
        """Copy each row from the past tokens that were routed alike in its known rows, nearer rows counting more."""
        rows = torch.arange(self.spec.shape[0], device=used_BTLE.device)
        alike_LBTS = used_BTLE.permute(2, 0, 1, 3) @ past_BSLE.permute(2, 0, 3, 1)
        alike_LBTS = alike_LBTS / self.top_k_L[:, None, None, None]
        distance_LL = (rows[:, None] - rows).clamp(min=1).to(used_BTLE.dtype)
        decay_LL = torch.exp(-F.softplus(self.forget_layers) * (distance_LL - 1)) * known_LL
        score = torch.einsum("ml,lbts->mbts", decay_LL * self.alike_L[:, None], alike_LBTS)
        present = weights_BTS > 0
        score = score + self.before * torch.log(weights_BTS + LEAST)
        score = score.masked_fill(~present, -1e4)
        nothing = self.nothing_L[:, None, None] + self.before * np.log(0.1)
        top = torch.maximum(score.amax(-1), nothing).detach()
        weight = torch.exp(score - top[..., None])
        left = torch.exp(nothing - top)
        total = weight.sum(-1) + left
        share_LBTE = (weight / total[..., None]) @ past_BSLE.permute(2, 0, 1, 3)
        popularity_LE = self.history.popularity_LE
        share_LBTE = share_LBTE + (left / total)[..., None] * popularity_LE[:, None, None]
        raised = torch.log((share_LBTE + FLOOR) / (popularity_LE[:, None, None] + FLOOR))
        return raised.permute(1, 2, 0, 3) * self.copied_LE


def _named(said: Said) -> State:
    return {"said_routing": said.logits.routing, "said_hidden": said.hidden, "said_weights": said.weights}
