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
BLOCK_CELLS = 1 << 17  # scores that are compared together, so that the comparisons stay in the processor's cache
DRAWN_TOGETHER = 100  # draws of one matrix product: 8 MB of weights for 10,000 sequences


def ranks(scores_TLE: np.ndarray, experts_TLK: np.ndarray) -> np.ndarray:
    """Give each true expert's place, 0 = largest score, as int16 [T, L, K]; -1 where there is no expert."""
    out = np.empty(experts_TLK.shape, dtype=np.int16)
    together = max(1, BLOCK_CELLS // max(1, int(np.prod(scores_TLE.shape[1:]))))
    for start in range(0, len(out), together):
        block = slice(start, start + together)
        out[block] = _ranks(scores_TLE[block], experts_TLK[block])
    return out


def _ranks(scores_TLE: np.ndarray, experts_TLK: np.ndarray) -> np.ndarray:
    ids = np.maximum(experts_TLK, 0).astype(np.int64)
    own = np.take_along_axis(scores_TLE, ids, axis=2)
    out = np.empty(ids.shape, dtype=np.int16)
    places = np.arange(scores_TLE.shape[2])
    for k in range(ids.shape[2]):
        mine = own[:, :, k, None]
        out[:, :, k] = _count(scores_TLE > mine)
        level = scores_TLE == mine
        if np.count_nonzero(level) > mine.size:  # somebody else has the same score
            level &= places < ids[:, :, k, None]
            out[:, :, k] += _count(level)
    out[experts_TLK < 0] = -1
    return out


def _count(true_TLE: np.ndarray) -> np.ndarray:
    """Count what is true, int16 [T, L]; eight at a time where they come in eights, which is 3 times as fast."""
    if true_TLE.shape[2] % 8:
        return true_TLE.sum(-1, dtype=np.int16)
    return np.bitwise_count(true_TLE.view(np.uint64)).sum(-1, dtype=np.int16)


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
        hits, totals = _hits(self._total(), k)
        return np.divide(hits, totals, out=np.full(len(totals), np.nan), where=totals > 0)

    def recall(self, k: int | Sequence[int]) -> float:
        """Give recall when naming k, all layers averaged."""
        return float(np.nanmean(self.per_layer(k)))

    def interval(self, k: int | Sequence[int], seed: int = 0) -> tuple[float, float]:
        """Give the bootstrap interval of `recall` over sequences, at `CONFIDENCE`."""
        self._total()
        hits, totals = zip(*(_hits(count, k) for count in self.counts), strict=True)
        return interval_of(resampled(np.stack(hits), np.stack(totals), seed))


def resampled(hits_NL: np.ndarray, totals_NL: np.ndarray, seed: int = 0) -> np.ndarray:
    """Give the layer-averaged share of hits in each of `RESAMPLES` draws of sequences, float64 [R]; nan where empty.

    The same seed draws the same sequences, so that the draws of two predictors can be compared one by one.
    """
    num_sequences, rng = len(hits_NL), np.random.default_rng(seed)
    draws = []
    for start in range(0, RESAMPLES, DRAWN_TOGETHER):
        size = min(DRAWN_TOGETHER, RESAMPLES - start)
        weights = rng.multinomial(num_sequences, np.full(num_sequences, 1 / num_sequences), size=size).astype(float)
        draws.append(average(weights @ hits_NL, weights @ totals_NL))
    return np.concatenate(draws)


def interval_of(draws_R: np.ndarray) -> tuple[float, float]:
    """Give the middle `CONFIDENCE` of draws, those that are nan left out."""
    low, high = np.nanquantile(draws_R, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return float(low), float(high)


def average(hits_L: np.ndarray, totals_L: np.ndarray) -> np.ndarray:
    """Give the mean over layers [..., L] of hits / totals; layers without any do not count, nan where none has."""
    shares = np.divide(hits_L, totals_L, out=np.zeros(np.shape(hits_L)), where=np.asarray(totals_L) > 0)
    layers = (np.asarray(totals_L) > 0).sum(-1)
    return np.divide(shares.sum(-1), layers, out=np.full(np.shape(layers), np.nan), where=layers > 0)


def _hits(counts_LE: np.ndarray, k: int | Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Give hits [L] when naming k, and true experts [L]."""
    named = np.broadcast_to(np.asarray(k), counts_LE.shape[:1])
    inside = np.arange(counts_LE.shape[1]) < named[:, None]
    return (counts_LE * inside).sum(1), counts_LE.sum(1)
