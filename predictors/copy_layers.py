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

MASKED = -1e4
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
        """Give logits [B, L, E] of the rows ahead of `layer`, whose experts are in `used` up to it.

        Only the rows within reach, M of them, are computed: all would take ten times as long.
        """
        num_layers = self.spec.shape[0]
        ahead_M = layer + 1 + torch.arange(self.layer_sizes.reach, device=used_BLE.device)
        rows_M = ahead_M.clamp(max=num_layers - 1)
        linear = torch.einsum("bx,mxe->bme", used_BLE.flatten(1), self.pairs[rows_M])
        inner = (used_BLE.flatten(1) @ self.used_in + self.hidden_in(context["said_hidden"]))[:, None]
        deep = torch.einsum("bmq,mqe->bme", F.gelu(inner + self.layer_in[rows_M]), self.layer_heads[rows_M])
        past_BSX = context["memory_routing"]
        known_ML = (torch.arange(num_layers, device=used_BLE.device) <= layer).to(used_BLE.dtype)
        wanted_BMX = (used_BLE[:, None] * self._kinship(rows_M, known_ML)[..., None]).flatten(2)
        scores_BMS = wanted_BMX @ past_BSX.transpose(1, 2) + self._before(context["said_weights"])[:, None]
        weight_BMS, left_BM = _shares(scores_BMS, self._nothing(rows_M)[:, None])
        followed_BSME = past_BSX.unflatten(-1, self.spec.shape)[:, :, rows_M]
        share = torch.einsum("bms,bsme->bme", weight_BMS, followed_BSME)
        found_BME = linear + deep + self._raised(share, left_BM, rows_M)
        place_ML = (ahead_M[:, None] == torch.arange(num_layers, device=used_BLE.device)).to(used_BLE.dtype)
        return context["said_routing"] + torch.einsum("ml,bme->ble", place_ML, found_BME)

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
        scores_LBTS = (self._kinship(rows, known_LL) @ alike_LBTS.flatten(1)).view_as(alike_LBTS)
        weights, left_LBT = _shares(scores_LBTS + self._before(weights_BTS), self._nothing(rows)[:, None, None, None])
        share_LBTE = weights @ past_BSLE.permute(2, 0, 1, 3)
        return self._raised(share_LBTE.permute(1, 2, 0, 3), left_LBT.permute(1, 2, 0), rows)

    def _kinship(self, rows_M: Tensor, known_ML: Tensor) -> Tensor:
        """Give [M, L]: what an expert of a known row that a past token shares says for a row ahead."""
        distance_ML = (rows_M[:, None] - torch.arange(self.spec.shape[0], device=rows_M.device)).clamp(min=1)
        decay_ML = torch.exp(-F.softplus(self.forget_layers) * (distance_ML.to(known_ML.dtype) - 1)) * known_ML
        return decay_ML * self.alike_L[rows_M][:, None] / self.top_k_L

    def _before(self, said: Tensor) -> Tensor:
        """Give what is added to the score of a past token that the token itself gave the weight `said`, [..., S]."""
        return torch.where(said > 0, self.before * torch.log(said + LEAST), MASKED)

    def _nothing(self, rows_M: Tensor) -> Tensor:
        """Give the score of popularity, [M]."""
        return self.nothing_L[rows_M] + self.before * np.log(0.1)

    def _raised(self, share: Tensor, left: Tensor, rows_M: Tensor) -> Tensor:
        """Turn shares [..., M, E] into logits; popularity has what is left [..., M]."""
        popularity_ME = self.history.popularity_LE[rows_M]
        share = share + left[..., None] * popularity_ME
        return torch.log((share + FLOOR) / (popularity_ME + FLOOR)) * self.copied_LE[rows_M]


def _shares(scores: Tensor, nothing: Tensor) -> tuple[Tensor, Tensor]:
    """Turn scores [..., S] of past tokens, and of nothing alike [..., 1], into weights [..., S] and [...]."""
    weights = torch.softmax(torch.cat([scores, nothing.expand(*scores.shape[:-1], 1)], dim=-1), dim=-1)
    return weights[..., :-1], weights[..., -1]


def _named(said: Said) -> State:
    return {"said_routing": said.logits.routing, "said_hidden": said.hidden, "said_weights": said.weights}
