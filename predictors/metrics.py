"""Recall of predicted experts, with an interval over sequences. Knows scores and true experts, no predictors or files.

Recall when naming k = share of a token's true experts among the k largest scores, all layers averaged, each
sequence's first token left out. Accuracy over all L*E bits is not reported: a predictor that names nobody would reach
1 - k/E. Ties are broken by expert id, as a stable sort would.
"""

# T tokens, L MoE layers, K true experts per token (-1 = none), E experts, N sequences

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ..collect.errors import DataError

CONFIDENCE = 0.95
RESAMPLES = 1000


def ranks(scores_TLE: np.ndarray, experts_TLK: np.ndarray) -> np.ndarray:
    """Give each true expert's place, 0 = largest score, as int16 [T, L, K]; -1 where there is no expert."""
    ids = np.maximum(experts_TLK, 0).astype(np.int64)
    own = np.take_along_axis(scores_TLE, ids, axis=2)
    out = np.empty(ids.shape, dtype=np.int16)
    places = np.arange(scores_TLE.shape[2])
    for k in range(ids.shape[2]):
        ahead = scores_TLE > own[:, :, k, None]
        ahead |= (scores_TLE == own[:, :, k, None]) & (places < ids[:, :, k, None])
        out[:, :, k] = ahead.sum(-1)
    out[experts_TLK < 0] = -1
    return out


@dataclass
class RecallMeter:
    """Collect the ranks of true experts, sequence by sequence, and give recall at any k."""

    num_experts: int
    """Experts of the largest layer."""
    skip_first: bool = True
    """Leave out each sequence's first token, of which nothing past is known."""
    counts: list[np.ndarray] = field(default_factory=list)
    """Per sequence, int64 [L, E]: how many true experts had each rank."""

    def add(self, scores_TLE: np.ndarray, experts_TLK: np.ndarray) -> None:
        """Add one sequence."""
        start = 1 if self.skip_first else 0
        self.add_ranks(ranks(scores_TLE[start:], experts_TLK[start:]))

    def add_ranks(self, ranks_TLK: np.ndarray) -> None:
        """Add one sequence by its true experts' ranks, the first token already left out."""
        num_layers, num_experts = ranks_TLK.shape[1], self.num_experts
        flat = ranks_TLK + np.arange(num_layers)[None, :, None] * num_experts
        flat = flat[ranks_TLK >= 0].astype(np.int64)
        self.counts.append(np.bincount(flat, minlength=num_layers * num_experts).reshape(num_layers, num_experts))

    def _total(self) -> np.ndarray:
        if not self.counts or not any(count.any() for count in self.counts):
            raise DataError("Recall of no tokens is undefined; give at least one sequence of two tokens or more.")
        return np.sum(self.counts, axis=0)

    def per_layer(self, k: int | Sequence[int]) -> np.ndarray:
        """Give recall [L] when naming k experts (one number, or one per layer); nan for a layer without tokens."""
        return _recall(self._total(), k)

    def recall(self, k: int | Sequence[int]) -> float:
        """Give recall when naming k, all layers averaged."""
        return float(np.nanmean(self.per_layer(k)))

    def interval(self, k: int | Sequence[int], seed: int = 0) -> tuple[float, float]:
        """Give the bootstrap interval of `recall` over sequences, at `CONFIDENCE`."""
        self._total()
        counts_NLE = np.stack(self.counts)
        rng = np.random.default_rng(seed)
        draws = []
        for _ in range(RESAMPLES):
            weights_N = np.bincount(rng.integers(len(counts_NLE), size=len(counts_NLE)), minlength=len(counts_NLE))
            total = np.tensordot(weights_N, counts_NLE, axes=1)
            if total.any():
                draws.append(np.nanmean(_recall(total, k)))
        low, high = np.quantile(draws, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
        return float(low), float(high)


def _recall(counts_LE: np.ndarray, k: int | Sequence[int]) -> np.ndarray:
    named = np.broadcast_to(np.asarray(k), counts_LE.shape[:1])
    hits = np.array([row[:count].sum() for row, count in zip(counts_LE, named, strict=True)], dtype=np.float64)
    totals = counts_LE.sum(1)
    return np.divide(hits, totals, out=np.full(len(totals), np.nan), where=totals > 0)
