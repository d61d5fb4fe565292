"""MoE-Infinity's predictor: the request so far is matched with a collection of past requests' activation matrices.

A request's matrix [L, E] counts its uses of each expert, of its tokens so far and of this token's layers so far. Its
cosine with each matrix of the collection, over the layers that have any use yet, says which requests were alike; they
say which experts the layers ahead will use. Where the paper takes the one with the largest cosine, here all count, by
a softmax of cosine / temperature, so that two equally near ones cannot make the graph and the network differ.
Nothing is trained by gradients: `learn` fills the collection. `eam_online` goes on learning while it serves.
"""

# B batch, T tokens, X any number of queries, L MoE layers, E experts, C places of the collection

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, get_args

import numpy as np
import torch
from torch import Tensor

from ..collect.errors import SettingError
from ..collect.trace import SequenceRouting
from .activation_matrices import LEAST, Members, collect_matrices
from .base import Horizon, PredictorSpec
from .network import LayerNetwork, Logits, NetworkSettings, State
from .rows import RoutingStatistics


@dataclass(frozen=True, kw_only=True)
class EamSettings(NetworkSettings):
    """Size of the collection, and how requests are matched with it."""

    family: ClassVar[str] = "eam"

    capacity: int = 120
    """Matrices that the collection holds at most."""
    members: Members = "nearest"
    """What stands for a cluster where there are more sequences than places: its member nearest to the centre, or the
    centre itself."""
    temperature: float = 0.01
    """Difference of cosines at which a matrix counts e times as much as another; towards 0 the nearest alone counts."""
    decay: float = 1.0
    """Factor per token by which past uses count less; 1 matches the whole request, as in the paper. On gpt-oss 0.5
    names 7 points more of the experts used."""
    reach: int = 4
    """Layers ahead that are predicted."""
    seed: int = 0
    """Seed of the clustering."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_sizes("capacity", "reach")
        if self.members not in get_args(Members):
            raise SettingError(f"members must be one of {', '.join(get_args(Members))}, got {self.members!r}.")
        if not self.temperature >= 1e-3:
            raise SettingError(f"temperature must be at least 0.001 (cosines are float32), got {self.temperature}.")
        if not 0 < self.decay <= 1:
            raise SettingError(f"decay must lie in (0, 1], got {self.decay}.")

    def horizon(self, stack: str) -> Horizon:
        """Layers ahead, whatever the stack."""
        return "layer"

    def build(self, spec: PredictorSpec, known_ids: np.ndarray) -> EamNetwork:
        """Build the network; token ids do not matter to it."""
        return EamNetwork(spec, self)


class EamNetwork(LayerNetwork):
    """Predict by the requests that were most alike so far; has no parameters, only buffers."""

    context: ClassVar[tuple[str, ...]] = ("counts",)

    def __init__(self, spec: PredictorSpec, settings: EamSettings) -> None:
        super().__init__(spec, settings)
        self.sizes = settings
        self.collection_CLE: Tensor
        self.present_C: Tensor
        self.popularity_LE: Tensor
        self.register_buffer("collection_CLE", torch.zeros(settings.capacity, *spec.shape))
        self.register_buffer("present_C", torch.arange(settings.capacity) < 1)
        self.register_buffer("popularity_LE", torch.zeros(spec.shape))

    @torch.no_grad()
    def warm_start(self, statistics: RoutingStatistics) -> None:
        """Start with one request, that of all training sequences together."""
        popularity_LE = torch.as_tensor(statistics.popularity_LE)
        self.popularity_LE.copy_(popularity_LE)
        self._fill((popularity_LE / self.top_k_L[:, None])[None])

    def learn(self, rows: Sequence[SequenceRouting], statistics: RoutingStatistics) -> None:
        """Fill the collection with the training sequences' matrices, or with those that stand for them."""
        self.warm_start(statistics)
        sizes = self.sizes
        found = collect_matrices(
            rows,
            self.spec.topology,
            self.spec.shape[1],
            capacity=sizes.capacity,
            members=sizes.members,
            seed=sizes.seed,
        )
        self._fill(torch.as_tensor(found))

    def _fill(self, matrices: Tensor) -> None:
        self.collection_CLE.zero_()
        self.collection_CLE[: len(matrices)] = matrices
        self.present_C.copy_(torch.arange(self.sizes.capacity) < len(matrices))

    def _logits(self, counts_XLE: Tensor) -> Tensor:
        """Give logits [X, L, E] of what the requests did that are like those with these counts."""
        total_XL1 = counts_XLE.sum(-1, keepdim=True)
        shares_XLE = counts_XLE / total_XL1.clamp(min=1e-9)
        seen_XL = (total_XL1 > 0).squeeze(-1).to(shares_XLE.dtype)
        flat_CD = self.collection_CLE.flatten(1)
        squares_XC = seen_XL @ self.collection_CLE.square().sum(-1).T * shares_XLE.square().sum((-1, -2))[:, None]
        cosine_XC = shares_XLE.flatten(1) @ flat_CD.T / squares_XC.sqrt().clamp(min=1e-9)
        nearness_XC = (cosine_XC / self.sizes.temperature).masked_fill(~self.present_C, -torch.inf).softmax(-1)
        matched_XLE = (nearness_XC @ flat_CD).unflatten(-1, self.spec.shape) * self.top_k_L[:, None]
        known_X11 = seen_XL.amax(-1)[:, None, None] > 0
        return torch.logit(torch.where(known_X11, matched_XLE, self.popularity_LE).clamp(LEAST, 1 - LEAST))

    def start(self, batch: int) -> State:
        """Give the state before the first token: no uses."""
        return {"counts": torch.zeros(batch, *self.spec.shape)}

    def _counted(self, previous_BTLE: Tensor, state: State) -> Tensor:
        """Give the counts [B, T, L, E] of the tokens before each."""
        found, counts_BLE = [], state["counts"]
        for previous_BLE in previous_BTLE.unbind(1):
            counts_BLE = self.sizes.decay * counts_BLE + previous_BLE
            found.append(counts_BLE)
        return torch.stack(found, dim=1)

    def forward(self, ids_BT: Tensor, previous_BTLE: Tensor, state: State) -> tuple[Logits, State]:
        """Give logits [B, T, L, E] by the tokens before each, and the counts before the last as the state."""
        counts_BTLE = self._counted(previous_BTLE, state)
        logits_XLE = self._logits(counts_BTLE.flatten(0, 1))
        return Logits(logits_XLE.unflatten(0, tuple(ids_BT.shape))), {"counts": counts_BTLE[:, -1]}

    def step(self, ids_B: Tensor, previous_BLE: Tensor, state: State) -> tuple[Logits, State]:
        """Run one token: logits [B, L, E], and the counts of the tokens before it as the state."""
        counts_BLE = self.sizes.decay * state["counts"] + previous_BLE
        return Logits(self._logits(counts_BLE)), {"counts": counts_BLE}

    def layers(
        self, ids_BT: Tensor, previous_BTLE: Tensor, used_BTLE: Tensor, state: State, stride: int
    ) -> tuple[Logits, Tensor, State]:
        """Give also logits [B, T, L, E] whose row l knows this token's rows up to l - stride."""
        counts_XLE, used_XLE = self._counted(previous_BTLE, state).flatten(0, 1), used_BTLE.flatten(0, 1)
        logits, after = self(ids_BT, previous_BTLE, state)
        ahead_BTLE = logits.routing.clone()
        for row in range(stride, self.spec.shape[0]):
            known_XLE = self._known(counts_XLE, used_XLE, torch.tensor(row - stride))
            ahead_BTLE[:, :, row] = self._logits(known_XLE)[:, row].unflatten(0, tuple(ids_BT.shape))
        return logits, ahead_BTLE, after

    def ahead(self, layer: Tensor, used_BLE: Tensor, context: State) -> Tensor:
        """Give logits [B, L, E] of all rows, from the rows up to `layer` too."""
        return self._logits(self._known(context["counts"], used_BLE, layer))

    def _known(self, counts_XLE: Tensor, used_XLE: Tensor, layer: Tensor) -> Tensor:
        """Add this token's uses in the rows up to `layer` to the counts, which its step has let decay already."""
        rows_L1 = torch.arange(self.spec.shape[0])[:, None]
        return self.sizes.decay * counts_XLE + used_XLE * (rows_L1 <= layer)
