"""What a first look through a source finds out: largest id, top-k, range of weights; and the topology from that."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import SettingError, TraceError
from ..row_checks import WEIGHT_SLACK
from ..topology import MoeLayer, MoeTopology, Stack
from ..trace import MAX_EXPERTS, MAX_LAYERS, TraceHeader, WeightsKind
from .config import ImportConfig
from .contract import refuse
from .report import ImportReport

LARGEST_WEIGHT = 65504  # of float16


class Survey:
    """Gather what the header needs, choice by choice; a choice that contradicts the ones before is refused."""

    def __init__(self, config: ImportConfig) -> None:
        self.config = config
        self.top_k = config.top_k
        self.largest = -1
        self.known: int | None = config.experts
        """Experts per layer, where they need not be taken from the largest id."""
        self._low, self._high = np.inf, -np.inf
        self._low_sum, self._high_sum = np.inf, -np.inf
        self._weighted: bool | None = None

    def choice(self, path: Path, place: str, ids: Any, weights: Any = None) -> None:
        """Look at one token's experts in one layer, as a log has them.

        Raises:
            TraceError: if they are no k distinct ids in range, or weights do not go with them.
        """
        if not isinstance(ids, list) or not ids or not all(type(item) is int for item in ids):
            raise refuse(path, place, f"its expert ids must be a list of integers, got {str(ids)[:60]}")
        self.top_k = self.top_k or len(ids)
        if len(ids) != self.top_k:
            raise refuse(path, place, f"it has {len(ids)} experts where top-{self.top_k} was expected")
        if min(ids) < 0 or max(ids) >= self.limit:
            raise refuse(path, place, self.out_of_range(ids))
        if len(set(ids)) != len(ids):
            raise refuse(path, place, f"its experts {ids} are not distinct")
        self.largest = max(self.largest, *ids)
        if self._weighted is None:
            self._weighted = weights is not None
        if self._weighted != (weights is not None):
            raise refuse(path, place, "it has no weights, others have" if self._weighted else "only it has weights")
        if weights is None:
            return
        if (
            not isinstance(weights, list)
            or len(weights) != len(ids)
            or not all(type(w) in (int, float) for w in weights)
        ):
            raise refuse(path, place, f"its weights must be {len(ids)} numbers, got {str(weights)[:60]}")
        low, high = min(weights), max(weights)  # where one is nan these may be, too, or the sum is
        if not -LARGEST_WEIGHT <= low <= high <= LARGEST_WEIGHT or np.isnan(sum(weights)):
            shown = str(weights)[:60]
            raise refuse(path, place, f"its weights {shown} are not all finite in float16")
        total = sum(weights)
        self._low, self._high = min(self._low, low), max(self._high, high)
        self._low_sum, self._high_sum = min(self._low_sum, total), max(self._high_sum, total)

    def array_choices(self, path: Path, place: str, experts: np.ndarray) -> None:
        """Look at the choices of an array, integers [T, L, k]; -1 is an absent expert.

        Raises:
            TraceError: if an id is out of range, or top-k is not that of the choices before.
        """
        self.top_k = self.top_k or experts.shape[2]
        if experts.shape[2] != self.top_k:
            raise refuse(path, place, f"it has top-{experts.shape[2]} where top-{self.top_k} was expected")
        low, high = int(experts.min()), int(experts.max())
        if low < -1 or high >= self.limit:
            token, layer, _ = np.argwhere((experts < -1) | (experts >= self.limit))[0].tolist()
            wrong = [int(item) for item in experts[token, layer] if item != -1]
            raise refuse(path, f"{place}, token {token}, layer {layer}", self.out_of_range(wrong))
        self.largest = max(self.largest, high)

    def limit_reached(self, path: Path, place: str, experts: np.ndarray, logical: int) -> None:
        """Look at the ids of an array of any top-k; `logical` is the number of experts that a map leads to, or 0.

        Raises:
            TraceError: if an id is out of range, or the map leads to more experts than the config says.
        """
        if self.config.experts is not None and logical > self.config.experts:
            raise refuse(path, place, f"its map leads to {logical} experts, --experts says {self.config.experts}")
        low, high = int(experts.min(initial=-1)), int(experts.max(initial=-1))
        if low < -1 or high >= self.limit:
            raise refuse(path, place, self.out_of_range([item for item in (low, high) if item != -1]))
        self.largest = max(self.largest, high)

    def weights_array(self, path: Path, weights: np.ndarray) -> None:
        """Look at the weights [T, L, k] of a whole file.

        Raises:
            TraceError: if they are not all finite.
        """
        values = weights.astype(np.float32)
        sums = values.sum(axis=-1)
        if not np.isfinite(sums).all():
            token = int(np.argwhere(~np.isfinite(sums))[0][0])
            raise refuse(path, f"token {token}", "its weights are not all finite")
        self._weighted = True
        self._low, self._high = min(self._low, float(values.min())), max(self._high, float(values.max()))
        self._low_sum = min(self._low_sum, float(sums.min()))
        self._high_sum = max(self._high_sum, float(sums.max()))

    def out_of_range(self, ids: Any) -> str:
        """Say that ids do not fit."""
        wrong = next(item for item in ids if not 0 <= item < self.limit)
        hint = "" if self.config.experts is None else ": are these physical ids, with replicas?"
        return f"expert {wrong} is out of range 0..{self.limit - 1}{hint}"

    @property
    def limit(self) -> int:
        """Ids must be below this."""
        return MAX_EXPERTS if self.config.experts is None else self.config.experts

    @property
    def weights(self) -> WeightsKind:
        """What the weights are."""
        if not self._weighted:
            return "none"
        if 1 - WEIGHT_SLACK / 2 < self._low_sum <= self._high_sum < 1 + WEIGHT_SLACK / 2 and self._low > 0:
            return "normalized"
        return "unit" if self._low >= 0 and self._high <= 1 else "finite"

    def header(
        self,
        report: ImportReport,
        blocks: Sequence[int],
        *,
        paths: Sequence[Path],
        name: str,
        stack: Stack = "causal",
        **values: Any,
    ) -> TraceHeader:
        """Make the header of a trace with equal layers at the given blocks.

        Raises:
            TraceError: if a block is beyond what any model has.
            SettingError: if the config names another number of blocks.
        """
        assert self.top_k is not None
        if blocks[-1] >= MAX_LAYERS:
            raise TraceError(f"{self.config.source} has a layer {blocks[-1]}, legal is 0..{MAX_LAYERS - 1}; mend it.")
        experts = self.known
        if experts is None:
            experts = max(self.largest + 1, self.top_k)
            report.note(
                f"Each layer is taken to have {experts} experts, 1 + the largest id in the source; if the model has "
                "more, give --experts."
            )
        absent = [block for block in range(blocks[0], blocks[-1]) if block not in blocks]
        if absent:
            more = f" and {len(absent) - 8} more" if len(absent) > 8 else ""
            report.note(f"The source holds no layer {absent[:8]}{more}, between those that it has: {list(blocks)}.")
        layers = [
            MoeLayer(stack=stack, block=block, num_experts=experts, top_k=self.top_k)
            for block in chosen_blocks(self.config, blocks)
        ]
        given = {"weights": self.weights, **values}
        if self.config.model:
            given["model"] = self.config.model
        recording = {"format": name, "files": [path.name for path in paths[:20]]}
        return TraceHeader(topology=MoeTopology(layers=tuple(layers)), recording=recording, **given)


def chosen_blocks(config: ImportConfig, found: Sequence[int]) -> list[int]:
    """Give the block of each layer: those of the config, else as the source numbers them.

    Raises:
        SettingError: if the config names another number of blocks.
    """
    if config.blocks is None:
        return list(found)
    if len(config.blocks) != len(found):
        raise SettingError(f"blocks names {len(config.blocks)} blocks, {config.source} has {len(found)} MoE layers.")
    return config.blocks
