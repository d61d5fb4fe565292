"""What a predictor trained by gradients must offer, so that training and export know no family.

A family is one file with a settings class and its network, and one line in `registry`. Token-horizon networks keep
their state in named tensors whose first dimension is the batch; the parallel form over a sequence and the single step
are the same function. Layer-horizon networks are token-horizon networks with a second function, which goes on from the
token's own state as its layers' true experts become known.
"""

# B batch, T tokens, L MoE layers served, E experts of the largest layer, V token ids

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ..collect.errors import SettingError
from ..collect.trace import SequenceRouting
from .base import Horizon, PredictorSpec
from .rows import RoutingStatistics

Link = Literal["sigmoid", "softmax"]
State = dict[str, Tensor]
ABSENT = -30.0  # logit of experts that a smaller layer does not have; their probability is 0 exactly


class Logits(NamedTuple):
    """What a token-horizon network says of tokens."""

    routing: Tensor
    """[..., L, E], of the token itself."""
    reuse: Tensor | None = None
    """[..., L, E], of the tokens after it; None without a reuse head."""


@dataclass(frozen=True, kw_only=True)
class NetworkSettings:
    """Settings of a family; subclasses add theirs and build its network."""

    family: ClassVar[str]
    learning_rate: ClassVar[float] = 1e-3
    """Highest learning rate, where training is given none."""
    weight_decay: ClassVar[float] = 0.01
    """Decay of matrices, where training is given none."""

    link: Link = "sigmoid"
    """How logits become probabilities; sigmoid trains by binary, softmax by soft-target cross-entropy."""
    distill_top: int = 0
    """Experts of a layer, those with the largest router scores, that are learned from too; none where a trace has no
    scores, or for 0."""
    distill_weight: float = 1.0
    """Weight of that beside the experts used."""

    def __post_init__(self) -> None:
        if self.link not in ("sigmoid", "softmax"):
            raise SettingError(f"link must be sigmoid or softmax, got {self.link!r}.")

    def require_sizes(self, *names: str) -> None:
        """Refuse settings that are not at least 1.

        Raises:
            SettingError: naming the first.
        """
        for name in names:
            if getattr(self, name) < 1:
                raise SettingError(f"{name} must be at least 1, got {getattr(self, name)}.")

    def require_shares(self, *names: str) -> None:
        """Refuse settings that do not lie in [0, 1).

        Raises:
            SettingError: naming the first.
        """
        for name in names:
            if not 0 <= getattr(self, name) < 1:
                raise SettingError(f"{name} must lie in [0, 1), got {getattr(self, name)}.")

    def build(self, spec: PredictorSpec, known_ids: np.ndarray) -> Network:
        """Build the network for a spec; `known_ids` are the token ids that get an embedding of their own."""
        raise NotImplementedError

    def source_model(self) -> str | None:
        """Name the model that `Network.start_from_model` is to be given when training starts anew, if any."""
        return None

    def horizon(self, stack: str) -> Horizon:
        """Say how far ahead the family predicts a stack."""
        return "token" if stack == "causal" else "batch"

    def to_json(self) -> dict[str, Any]:
        """Give the settings as plain values."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}


class Network(nn.Module):
    """Base of networks: knows the spec, the link and which experts exist."""

    def __init__(self, spec: PredictorSpec, settings: NetworkSettings) -> None:
        super().__init__()
        self.spec, self.settings = spec, settings
        num_experts = spec.shape[1]
        sizes = torch.tensor([spec.topology.layers[i].num_experts for i in spec.layers])
        top_k = torch.tensor([spec.topology.layers[i].top_k for i in spec.layers], dtype=torch.float32)
        self.exists_LE: Tensor
        self.top_k_L: Tensor
        self.register_buffer("exists_LE", torch.arange(num_experts)[None] < sizes[:, None], persistent=False)
        self.register_buffer("top_k_L", top_k, persistent=False)

    def warm_start(self, statistics: RoutingStatistics) -> None:
        """Set parameters from the statistics of the training sequences before the first gradient."""
        raise NotImplementedError

    def learn(self, rows: Sequence[SequenceRouting], statistics: RoutingStatistics) -> None:
        """Learn what needs no gradients from the training sequences; by default the warm start from their statistics.

        A network without parameters has learned everything by it, and no gradient follows.
        """
        self.warm_start(statistics)

    def start_from_model(self, model: Any) -> None:
        """Take what the family takes from the model itself, a transformers model; called after `learn`."""
        raise NotImplementedError

    def probabilities(self, logits: Tensor) -> Tensor:
        """Turn logits [..., L, E] into the probability that the token uses the expert."""
        if self.settings.link == "sigmoid":
            return torch.sigmoid(logits) * self.exists_LE
        return self.shares(logits).clamp(max=1)

    def shares(self, logits: Tensor) -> Tensor:
        """Share each layer's top-k out over its experts by softmax: [..., L, E], summing to top-k over a layer."""
        spread = torch.softmax(logits.masked_fill(~self.exists_LE, ABSENT), dim=-1) * self.exists_LE
        return spread * self.top_k_L[:, None]


class TokenNetwork(Network):
    """Token horizon: all MoE layers of a token, from ids up to it and routing before it."""

    rings: ClassVar[tuple[str, ...]] = ()
    """Names of the state that holds the last entries of something, [B, W, ...], oldest first: of those a step gives
    the newest entry [B, ...] alone, which costs no copy of the others."""

    @property
    def discount(self) -> float:
        """Discount per token of the uses that the reuse head foresees; 0 without a reuse head."""
        return getattr(self.settings, "discount", 0.0)

    def start(self, batch: int) -> State:
        """Give the state before the first token of `batch` sequences."""
        raise NotImplementedError

    def forward(self, ids_BT: Tensor, previous_BTLE: Tensor, state: State) -> tuple[Logits, State]:
        """Run a sequence at once, fed the true routing of each token's predecessor: logits [B, T, L, E]."""
        raise NotImplementedError

    def step(self, ids_B: Tensor, previous_BLE: Tensor, state: State) -> tuple[Logits, State]:
        """Run one token: logits [B, L, E] and what `follow` makes the next state of; equal to `forward`, which gives
        the whole state, token by token."""
        raise NotImplementedError

    def follow(self, state: State, given: State) -> State:
        """Give the state after a step: what it gave, entries of rings appended to them."""
        return {
            name: torch.cat([state[name][:, 1:], value[:, None]], dim=1) if name in self.rings else value
            for name, value in given.items()
        }


class LayerNetwork(TokenNetwork):
    """Layer horizon: a token's layers ahead, also from the true experts of its layers so far."""

    context: ClassVar[tuple[str, ...]]
    """Names of the state that `ahead` reads."""

    @property
    def reach(self) -> int:
        """Layers ahead that `ahead` predicts."""
        return getattr(self.settings, "reach", 1)

    def layers(
        self, ids_BT: Tensor, previous_BTLE: Tensor, used_BTLE: Tensor, state: State, stride: int
    ) -> tuple[Logits, Tensor, State]:
        """Run a sequence as `forward` does and give also logits [B, T, L, E] of the layer horizon.

        Row l of those is from the true experts `used` of rows up to l - stride; it is what `ahead` gives for it
        after row l - stride.
        """
        raise NotImplementedError

    def ahead(self, layer: Tensor, used_BLE: Tensor, context: State) -> Tensor:
        """Give logits [B, L, E] of rows after `layer` (int64, a scalar, -1 before the first) for the token of the step
        that gave the state; rows of `used` after `layer` are not looked at, and rows beyond the reach mean nothing."""
        raise NotImplementedError


class BatchNetwork(Network):
    """Batch horizon: all MoE layers of all tokens, from all ids."""

    def forward(self, ids_BT: Tensor, mask_BT: Tensor) -> Tensor:
        """Give logits [B, T, L, E]; `mask_BT` is False on padding, which changes nothing elsewhere."""
        raise NotImplementedError
