"""Forecasts: what a predictor said of one step, as one number per expert. Knows arrays; no threads, slots or models."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..collect.topology import MoeTopology
from ..predictors.base import PredictorSpec


class Forecast(NamedTuple):
    """Hold the probability that a step needs each expert."""

    step: int
    """The step it was made for."""
    demand: np.ndarray
    """float32 [all experts, flat]: probability that some token of the step uses the expert; 0 where not served."""
    reuse: np.ndarray | None = None
    """float32 [all experts, flat], None without a reuse head: how much the steps after it will use the expert, summed
    over sequences; 0 where not served."""


class FlatMap:
    """Map a predictor's rows [L, E] to flat expert indices of the whole model."""

    def __init__(self, spec: PredictorSpec, topology: MoeTopology) -> None:
        _, width = spec.shape
        sizes = [topology.layers[layer].num_experts for layer in spec.layers]
        self.num_experts = topology.num_experts
        self._target = np.concatenate(
            [np.arange(topology.offsets[layer], topology.offsets[layer + 1]) for layer in spec.layers]
        )
        self._source = np.concatenate([row * width + np.arange(size) for row, size in enumerate(sizes)])

    def flat(self, scores_LE: np.ndarray) -> np.ndarray:
        """Spread [..., L, E] over all experts of the model: float32 [..., all experts]."""
        before = scores_LE.shape[:-2]
        flat = np.zeros((*before, self.num_experts), np.float32)
        flat[..., self._target] = scores_LE.reshape(*before, -1)[..., self._source]
        return flat

    def multi_hot(self, ids: list[np.ndarray], shape: tuple[int, int]) -> np.ndarray:
        """Mark the experts [T, L, E] that tokens used, from one int array [T, k] per served layer (-1 = dropped)."""
        num_tokens = len(ids[0])
        used = np.zeros((num_tokens, *shape), np.float32)
        for row, experts in enumerate(ids):
            tokens, ranks = np.nonzero(experts >= 0)
            used[tokens, row, experts[tokens, ranks]] = 1.0
        return used


def union(probs: np.ndarray, axes: int) -> np.ndarray:
    """Combine the first `axes` axes: the probability that at least one of those tokens uses the expert."""
    return 1.0 - np.prod(1.0 - probs, axis=tuple(range(axes)))
