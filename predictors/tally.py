"""What a predictor named right, counted per sequence, so that any set of sequences can be summed and drawn again.

Knows scores and true experts; knows no predictors or files. Each sequence's first token is left out everywhere. What is
counted: hits by number named and layer; by position; tokens whose whole path was named; hits under a budget over all
layers, best scores first; hits among the experts that a cache missed.

Worked example: 2 layers, top-1, one token that used experts 3 and 0 and scores that put 3 first and 0 second. Naming 1
per layer finds 1 of 2 (recall .5) and not the whole path; naming 2 finds both, with precision .5.
"""

# T tokens, L MoE layers, K true experts per token (-1 = none), E experts, C columns: ways of naming, N sequences

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np

from ..collect.errors import DataError
from .base import PredictorSpec
from .metrics import average, interval_of, ranks, resampled

NUMBERS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)  # named per layer, where layers have so many
MULTIPLES = (1, 2, 3, 4)  # of each layer's own top-k
WHOLE = (1, 2)  # multiples of top-k at which whole paths are counted
BUDGETS = (0.25, 0.5, 1.0)  # shares of the experts that a token uses over all layers
OWN = "1k"  # the column of each layer's own top-k

Interval = tuple[float, float]


class SequenceTally(NamedTuple):
    """Counts of one sequence."""

    hits_CL: np.ndarray
    used_L: np.ndarray
    """True experts."""
    tokens_L: np.ndarray
    """Tokens with true experts."""
    hits_PL: np.ndarray
    """By bucket of position, naming top-k."""
    used_PL: np.ndarray
    whole: np.ndarray
    """Tokens, and those whose whole path was named, per entry of WHOLE."""
    budget: np.ndarray
    """True experts, and those within the budget, per entry of BUDGETS."""
    missed: np.ndarray
    """Experts that a cache missed, and those of them named by top-k."""


class Tally:
    """Count what one predictor names at one horizon; sequences are told apart by a key of the caller's."""

    def __init__(self, spec: PredictorSpec) -> None:
        layers = [spec.topology.layers[index] for index in spec.layers]
        self.own_k = np.array([layer.top_k for layer in layers])
        self.sizes = np.array([layer.num_experts for layer in layers])
        self.num_experts = spec.shape[1]
        numbers = sorted({*(n for n in NUMBERS if n <= self.num_experts), *self._multiples()})
        named = {f"{factor}k": factor * self.own_k for factor in MULTIPLES} | {
            str(n): np.full(len(layers), n) for n in numbers
        }
        self.columns = list(named)
        self.named_CL = np.stack([np.minimum(count, self.sizes) for count in named.values()])
        self.sequences: dict[int, SequenceTally] = {}

    def _multiples(self) -> set[int]:
        found = {factor * int(k) for factor in MULTIPLES for k in self.own_k}
        return {number for number in found if number <= self.num_experts}

    def add(
        self, key: int, scores_TLE: np.ndarray, experts_TLK: np.ndarray, missed_TLK: np.ndarray | None = None
    ) -> None:
        """Add one sequence; `missed_TLK` says which of its experts a cache did not hold when they were needed."""
        scores, experts = scores_TLE[1:], experts_TLK[1:]
        places = ranks(scores, experts)
        used = places >= 0
        inside = used & (places < self.own_k[:, None])
        counts_LE = _by_rank(places, self.num_experts)
        upto = np.concatenate([np.zeros((len(counts_LE), 1), np.int64), counts_LE.cumsum(1)], axis=1)
        buckets = buckets_of(np.arange(1, len(scores) + 1))
        starts = np.searchsorted(buckets, np.arange(buckets[-1] + 1)) if len(buckets) else np.zeros(0, np.int64)
        per_token = used.sum(2), inside.sum(2)
        missed = np.zeros(experts.shape, bool) if missed_TLK is None else missed_TLK[1:] & used
        self.sequences[key] = SequenceTally(
            hits_CL=np.take_along_axis(upto, self.named_CL.T, axis=1).T,
            used_L=upto[:, -1],
            tokens_L=used.any(2).sum(0),
            hits_PL=np.add.reduceat(per_token[1], starts) if len(starts) else per_token[1][:0],
            used_PL=np.add.reduceat(per_token[0], starts) if len(starts) else per_token[0][:0],
            whole=self._whole(places, used),
            budget=self._budget(scores, experts),
            missed=np.array([missed.sum(), (missed & inside).sum()]),
        )

    def _whole(self, places: np.ndarray, used: np.ndarray) -> np.ndarray:
        counted = used.any((1, 2))
        found = [(counted & (~used | (places < factor * self.own_k[:, None])).all((1, 2))).sum() for factor in WHOLE]
        return np.array([counted.sum(), *found])

    def _budget(self, scores_TLE: np.ndarray, experts_TLK: np.ndarray) -> np.ndarray:
        """Fetch the best scores of a token over all layers; equal scores at the limit count with their mean."""
        if not (experts_TLK >= 0).any():
            return np.zeros(1 + len(BUDGETS))
        present = (experts_TLK >= 0).any((0, 2))  # a layer of which nothing is known competes for nothing
        scores_TLE, experts_TLK = scores_TLE[:, present], experts_TLK[:, present]
        used = experts_TLK >= 0
        flat = scores_TLE.reshape(len(scores_TLE), -1)
        own = np.take_along_axis(scores_TLE, np.maximum(experts_TLK, 0).astype(np.int64), axis=2)
        own = np.where(used, own, -np.inf).reshape(len(flat), -1)
        counts = [max(1, round(share * int(self.own_k[present].sum()))) for share in BUDGETS]
        places = flat.shape[1] - np.array(counts)
        ordered = np.partition(flat, places, axis=1)
        found = [float(used.sum())]
        for count, place in zip(counts, places, strict=True):
            limit = ordered[:, place, None]
            above, level = (flat > limit).sum(1), (flat == limit).sum(1)
            share = (count - above) / level
            found.append(float(((own > limit).sum(1) + share * (own == limit).sum(1)).sum()))
        return np.array(found)

    def _kept(self, keys: Collection[int] | None) -> list[SequenceTally]:
        wanted = sorted(self.sequences) if keys is None else sorted(set(keys) & self.sequences.keys())
        kept = [self.sequences[key] for key in wanted]
        if not any(item.used_L.any() for item in kept):
            raise DataError("Recall of no tokens is undefined; give at least one sequence of two tokens or more.")
        return kept

    def hits(self, column: str = OWN, keys: Collection[int] | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Give hits and true experts per sequence and layer, [N, L] each, in the order of the keys."""
        kept, place = self._kept(keys), self.columns.index(column)
        return np.stack([item.hits_CL[place] for item in kept]), np.stack([item.used_L for item in kept])

    def recall(self, column: str = OWN, keys: Collection[int] | None = None) -> float:
        """Give recall, all layers averaged."""
        hits, used = self.hits(column, keys)
        return float(average(hits.sum(0), used.sum(0)))

    def per_layer(self, column: str = OWN) -> list[float | None]:
        """Give recall of each layer; None for one without tokens."""
        hits, used = (value.sum(0) for value in self.hits(column))
        return [float(h / u) if u else None for h, u in zip(hits, used, strict=True)]

    def precision(self, column: str = OWN) -> float:
        """Give the share of what is named that the token uses, all layers averaged."""
        kept, place = self._kept(None), self.columns.index(column)
        hits, tokens = (sum(item.hits_CL[place] for item in kept), sum(item.tokens_L for item in kept))
        return float(average(np.asarray(hits), tokens * self.named_CL[place]))

    def interval(self, column: str = OWN, keys: Collection[int] | None = None) -> Interval:
        """Give the bootstrap interval of recall over sequences."""
        return interval_of(resampled(*self.hits(column, keys)))

    def gain(self, other: Tally, column: str = OWN) -> tuple[float, Interval]:
        """Give by how much recall is above another's on the same sequences, and the interval of that difference."""
        assert self.sequences.keys() == other.sequences.keys()
        ours, theirs = self.hits(column), other.hits(column)
        return self.recall(column) - other.recall(column), interval_of(resampled(*ours) - resampled(*theirs))

    def whole_path(self) -> dict[str, float]:
        """Give the share of tokens all of whose experts in all layers are named, by multiple of top-k."""
        total = np.sum([item.whole for item in self._kept(None)], axis=0)
        return {f"{factor}k": float(count / total[0]) for factor, count in zip(WHOLE, total[1:], strict=True)}

    def budgets(self) -> dict[str, float]:
        """Give recall under each budget, by its share of a token's own experts in percent."""
        total = np.sum([item.budget for item in self._kept(None)], axis=0)
        return {f"{share:.0%}": float(hit / total[0]) for share, hit in zip(BUDGETS, total[1:], strict=True)}

    def positions(self) -> list[float | None]:
        """Give recall by bucket of position; see `bucket_names`."""
        kept = self._kept(None)
        hits, used = (_padded_sum([getattr(item, name) for item in kept]) for name in ("hits_PL", "used_PL"))
        return [None if np.isnan(share) else float(share) for share in average(hits, used)]

    def on_misses(self) -> tuple[int, float | None]:
        """Give how many experts the cache missed, and the share of them among the named; None where there are none."""
        misses, hits = np.sum([item.missed for item in self._kept(None)], axis=0).tolist()
        return misses, hits / misses if misses else None


def buckets_of(positions: np.ndarray) -> np.ndarray:
    """Number the buckets 1, 2-4, 5-16, 17-64, ... that positions (tokens before the token, at least 1) fall into."""
    return np.ceil(np.log(positions) / np.log(4) - 1e-9).astype(np.int64)


def bucket_names(count: int) -> list[str]:
    """Name the first buckets: 1, 2-4, 5-16."""
    return ["1", *(f"{4 ** (index - 1) + 1}-{4**index}" for index in range(1, count))][:count]


def _by_rank(ranks_TLK: np.ndarray, num_experts: int) -> np.ndarray:
    """Count true experts by layer and rank, int64 [L, E]."""
    num_layers = ranks_TLK.shape[1]
    flat = ranks_TLK + np.arange(num_layers)[None, :, None] * num_experts
    counts = np.bincount(flat[ranks_TLK >= 0].astype(np.int64), minlength=num_layers * num_experts)
    return counts.reshape(num_layers, num_experts)


def _padded_sum(arrays: Sequence[np.ndarray]) -> np.ndarray:
    total = np.zeros((max(map(len, arrays)), arrays[0].shape[1]), np.int64)
    for array in arrays:
        total[: len(array)] += array
    return total
