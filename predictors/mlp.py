"""ProMoE's predictor: for each MoE layer a small MLP, which names its experts some layers before it runs.

ProMoE's MLPs read the hidden state of an earlier layer. Traces hold no hidden states, so these read what comes closest:
the token's embedding, and the true experts of the token's layers so far. The MLP of row l sees the `window` rows before
it; those that are not known yet are 0, so one MLP serves every stride from 1 to `reach`, and, with none known, the
token horizon. Each starts as the token table. Nothing is carried from token to token.
"""

# B batch, T tokens, N = B*T, L MoE layers, E experts, D embedding, H hidden, W window, R reach

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from ..collect.errors import SettingError
from .base import Horizon, PredictorSpec
from .network import LayerNetwork, Logits, NetworkSettings, State
from .rows import RoutingStatistics
from .token_embedding import TokenEmbedding, factorise


@dataclass(frozen=True, kw_only=True)
class MlpSettings(NetworkSettings):
    """Sizes of the MLPs."""

    family: ClassVar[str] = "mlp"

    embedding: int = 128
    """Width of the token embedding."""
    hidden: int = 160
    """Hidden units of each layer's MLP; with the other defaults 2 M parameters at 24 layers of 32 experts, beside the
    embedding."""
    reach: int = 2
    """Layers ahead that are predicted: the largest stride."""
    window: int = 8
    """Layers back whose experts an MLP sees, known or not."""
    dropout: float = 0.1
    """Dropout on the hidden units, in training."""
    forget: float = 0.1
    """Share of token ids taken for unknown in training."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_sizes("embedding", "hidden", "reach")
        if self.window < self.reach:
            raise SettingError(
                f"window must be at least the reach of {self.reach} (nothing would be known), got {self.window}."
            )
        self.require_shares("dropout", "forget")

    def horizon(self, stack: str) -> Horizon:
        """Layers ahead, whatever the stack."""
        return "layer"

    def build(self, spec: PredictorSpec, known_ids: np.ndarray) -> MlpNetwork:
        """Build the network."""
        return MlpNetwork(spec, self, known_ids)


class MlpNetwork(LayerNetwork):
    """Predict a token's layers ahead, a hidden layer and a head for each."""

    context: ClassVar[tuple[str, ...]] = ("token",)

    def __init__(self, spec: PredictorSpec, settings: MlpSettings, known_ids: np.ndarray) -> None:
        super().__init__(spec, settings)
        self.sizes = settings
        num_layers, num_experts = spec.shape
        embedding, hidden = settings.embedding, settings.hidden
        self.embedding = TokenEmbedding(spec.vocab_size, known_ids, embedding)
        self.token_in = _weights(num_layers, embedding, hidden)
        self.experts_in = nn.Parameter(torch.randn(num_layers, settings.window, num_experts, hidden) * 0.1)
        self.hidden_bias = nn.Parameter(torch.zeros(num_layers, 1, hidden))
        self.heads = _weights(num_layers, hidden, num_experts)
        self.heads_bias = nn.Parameter(torch.zeros(num_layers, 1, num_experts))
        self.token_skip = _weights(num_layers, embedding, num_experts)
        self.dropout = nn.Dropout(settings.dropout)

    @torch.no_grad()
    def warm_start(self, statistics: RoutingStatistics) -> None:
        """Start at the token table; the MLPs add nothing yet."""
        bias, embedding, skip = factorise(statistics, self.sizes.embedding)
        self.embedding.start(statistics, embedding)
        self.token_skip.copy_(skip.unflatten(0, self.spec.shape).transpose(1, 2))
        self.heads.zero_()
        self.heads_bias.copy_(bias.view(self.spec.shape)[:, None])

    def start(self, batch: int) -> State:
        """Give the state before the first token: no token."""
        return {"token": torch.zeros(batch, self.sizes.embedding)}

    def _heads(self, hidden_LNH: Tensor, token_ND: Tensor) -> Tensor:
        hidden = self.dropout(torch.relu(hidden_LNH))
        return torch.baddbmm(self.heads_bias, hidden, self.heads) + token_ND @ self.token_skip

    def forward(self, ids_BT: Tensor, previous_BTLE: Tensor, state: State) -> tuple[Logits, State]:
        """Give logits [B, T, L, E] with no layer known, and the last token as the state."""
        token_BTD = self.embedding(ids_BT, self.sizes.forget if self.training else 0.0)
        token_ND = token_BTD.flatten(0, 1)
        logits_LNE = self._heads(token_ND @ self.token_in + self.hidden_bias, token_ND)
        return Logits(_by_token(logits_LNE, ids_BT)), {"token": token_BTD[:, -1]}

    def step(self, ids_B: Tensor, previous_BLE: Tensor, state: State) -> tuple[Logits, State]:
        """Run one token: logits [B, L, E] with no layer known, and its embedding as the state."""
        logits, after = self(ids_B[:, None], previous_BLE[:, None], state)
        return Logits(logits.routing[:, 0]), after

    def layers(
        self, ids_BT: Tensor, previous_BTLE: Tensor, used_BTLE: Tensor, state: State, stride: int
    ) -> tuple[Logits, Tensor, State]:
        """Give also logits [B, T, L, E] whose row l knows the rows l - window .. l - stride."""
        token_BTD = self.embedding(ids_BT, self.sizes.forget if self.training else 0.0)
        token_ND, used_LNE = token_BTD.flatten(0, 1), used_BTLE.flatten(0, 1).transpose(0, 1).contiguous()
        unaware = token_ND @ self.token_in + self.hidden_bias
        aware = unaware
        for distance in range(stride, min(self.sizes.window, len(used_LNE) - 1) + 1):
            seen = torch.bmm(used_LNE[:-distance], self.experts_in[distance:, distance - 1])
            aware = aware + nn.functional.pad(seen, (0, 0, 0, 0, distance, 0))
        logits, ahead = (self._heads(hidden, token_ND) for hidden in (unaware, aware))
        return Logits(_by_token(logits, ids_BT)), _by_token(ahead, ids_BT), {"token": token_BTD[:, -1]}

    def ahead(self, layer: Tensor, used_BLE: Tensor, context: State) -> Tensor:
        """Give logits [B, L, E] of the rows within reach of `layer`; those of all others are 0."""
        num_layers = self.spec.shape[0]
        rows_R = layer + 1 + torch.arange(self.sizes.reach)
        targets_R = rows_R.clamp(max=num_layers - 1)  # beyond the last row nothing is written
        before_RW = rows_R[:, None] - 1 - torch.arange(self.sizes.window)
        known_RW = (before_RW >= 0) & (before_RW <= layer)
        # only the MLPs within reach are read: all of them are 5 MB, one is .2
        seen_RBX = (used_BLE[:, before_RW.clamp(0, num_layers - 1)] * known_RW[..., None]).flatten(2).transpose(0, 1)
        token_BD = context["token"]
        hidden_RBH = torch.bmm(seen_RBX, self.experts_in[targets_R].flatten(1, 2))
        hidden_RBH = torch.relu(hidden_RBH + token_BD @ self.token_in[targets_R] + self.hidden_bias[targets_R])
        logits_RBE = torch.bmm(hidden_RBH, self.heads[targets_R]) + self.heads_bias[targets_R]
        logits_RBE = logits_RBE + token_BD @ self.token_skip[targets_R]
        places_LR = (torch.arange(num_layers)[:, None] == rows_R).to(logits_RBE.dtype)
        return torch.einsum("lr,rbe->ble", places_LR, logits_RBE)


def _weights(num_layers: int, inputs: int, outputs: int) -> nn.Parameter:
    """Draw one matrix per layer, as small as that of a linear layer."""
    return nn.Parameter(torch.randn(num_layers, inputs, outputs) / math.sqrt(inputs))


def _by_token(logits_LNE: Tensor, ids_BT: Tensor) -> Tensor:
    """Give [B, T, L, E]."""
    return logits_LNE.transpose(0, 1).unflatten(0, tuple(ids_BT.shape))
