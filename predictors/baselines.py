"""Free predictors: what a trained one has to beat, and the two that bound it (random, oracle). NumPy only.

All keep the estimator contract: the constructor stores, `fit(rows)` learns and returns self, learned names end in
`_`, predicting before `fit` raises NotFittedError, refitting forgets. `rows` are rows of a trace in its order.
Beside the steps of the contract each has `sequence`, which gives what the steps would say of a recorded sequence at
once: a trace is measured in a second instead of a minute.
"""

# B batch, T tokens, L MoE layers served, E experts of the largest layer, K experts per token

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import numpy as np

from ..collect.errors import DataError, NotFittedError
from ..collect.trace import SequenceRouting
from .base import Prediction, PredictorSpec, Step
from .rows import dense, join_parts, many_hot, statistics

KEPT_DRAWS = 512  # steps whose random scores are kept, since every sequence has these
TIE = 0.5  # tokens' worth of popularity added to a token's counts: decides ties, changes no order


class Baseline:
    """Base of the free predictors: specs, fitting and clipping to the experts that exist."""

    name: ClassVar[str]

    def __init__(self, spec: PredictorSpec) -> None:
        self.spec = spec

    def fit(self, rows: Iterable[SequenceRouting]) -> Any:
        """Learn from rows of the spec's stack.

        Raises:
            DataError: if there are none.
        """
        kept = [row for row in join_parts(rows) if row.stack == self.spec.stack]
        if not kept:
            raise DataError(f"{self.name} needs rows of stack {self.spec.stack!r} to fit, got none.")
        self._fit(kept)
        self.fitted_ = True
        return self

    def _fit(self, rows: list[SequenceRouting]) -> None:
        self.popularity_ = popularity(rows, self.spec)

    def sequence(self, token_ids: np.ndarray, used: np.ndarray) -> np.ndarray:
        """Give float32 [T, L, E], what steps or `predict` give for the tokens of one sequence.

        Args:
            token_ids: int64 [T].
            used: float32 [T, L, E]: 1 where the token used the expert.
        """
        self._check()
        return np.broadcast_to(self.popularity_, used.shape).copy()

    def _check(self) -> None:
        if not getattr(self, "fitted_", False):
            raise NotFittedError(f"{self.name} has learned nothing yet; call fit(rows) first.")


class Popularity(Baseline):
    """Name the experts that are used most, whatever the token."""

    name = "popularity"

    def start(self, batch: int) -> object:
        """Give the empty state."""
        self._check()
        return None

    def step(self, step: Step, state: object) -> tuple[Prediction, object]:
        """Give popularity for every sequence."""
        self._check()
        return Prediction(np.repeat(self.popularity_[None], len(step.token_ids), axis=0)), state

    def predict(self, token_ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
        """Give popularity for every token."""
        self._check()
        return np.broadcast_to(self.popularity_, (*token_ids.shape, *self.spec.shape)).copy()


class PreviousToken(Baseline):
    """Name the experts that the previous token used in the same layer; popularity decides the rest."""

    name = "previous_token"

    def start(self, batch: int) -> object:
        """Give the empty state."""
        self._check()
        return None

    def step(self, step: Step, state: object) -> tuple[Prediction, object]:
        """Give the mean of the previous routing and popularity; popularity alone where nothing was routed."""
        return Prediction(self._mean(step.previous)), state

    def sequence(self, token_ids: np.ndarray, used: np.ndarray) -> np.ndarray:
        """Give what steps give for one sequence; see `Baseline.sequence`."""
        return self._mean(np.concatenate([np.zeros_like(used[:1]), used[:-1]]))

    def _mean(self, previous: np.ndarray) -> np.ndarray:
        self._check()
        known = previous.max(-1, keepdims=True)  # 0 before the first token and where all was dropped
        return (0.5 * previous + (1 - 0.5 * known) * self.popularity_).astype(np.float32)


class TokenTable(Popularity):
    """Name the experts that the token id used most; popularity for ids that were not seen."""

    name = "token_table"

    def _fit(self, rows: list[SequenceRouting]) -> None:
        found = statistics(rows, self.spec.topology, self.spec.shape[1])
        self.popularity_ = found.popularity_LE
        self.token_ids_ = found.token_ids
        self.order_ = np.argsort(found.token_ids)
        counts = found.counts_S[:, None, None]
        self.table_ = (found.uses_SLE + TIE * found.popularity_LE) / (counts + TIE)

    def _lookup(self, token_ids: np.ndarray) -> np.ndarray:
        self._check()
        out = np.broadcast_to(self.popularity_, (*token_ids.shape, *self.spec.shape)).copy()
        if len(self.token_ids_):
            places = np.searchsorted(self.token_ids_, token_ids, sorter=self.order_).clip(max=len(self.token_ids_) - 1)
            places = self.order_[places]
            known = self.token_ids_[places] == token_ids
            out[known] = self.table_[places[known]]
        return out

    def step(self, step: Step, state: object) -> tuple[Prediction, object]:
        """Give the table's row for each id."""
        return Prediction(self._lookup(step.token_ids)), state

    def predict(self, token_ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
        """Give the table's row for each id."""
        return self._lookup(token_ids)

    def sequence(self, token_ids: np.ndarray, used: np.ndarray) -> np.ndarray:
        """Give the table's row for each id; see `Baseline.sequence`."""
        return self._lookup(token_ids)


class LayerPair(Popularity):
    """Name the experts that followed, one layer on or up to `reach`, the true experts of a layer (layer horizon).

    Each distance has counts of its own. Before a token's first layer, and after a layer that used none, popularity.
    """

    name = "layer_pair"

    def __init__(self, spec: PredictorSpec, reach: int = 1) -> None:
        super().__init__(spec)
        self.reach = reach

    def _fit(self, rows: list[SequenceRouting]) -> None:
        super()._fit(rows)
        self.following_ = [self._following(rows, distance) for distance in range(1, self.reach + 1)]

    def _following(self, rows: list[SequenceRouting], distance: int) -> np.ndarray:
        """Give float32 [L - distance, E, E]: the share of uses of one expert that another followed so far on."""
        num_pairs, num_experts = max(0, self.spec.shape[0] - distance), self.spec.shape[1]
        pairs = np.zeros(num_pairs * num_experts**2)
        layers = np.arange(num_pairs)[:, None, None] * num_experts**2
        for row in rows:
            experts = dense(row, self.spec.topology).astype(np.int64)
            here, after = experts[:, :num_pairs, :, None], experts[:, distance:, None, :]
            entries = layers + here * num_experts + after
            pairs += np.bincount(entries[(here >= 0) & (after >= 0)], minlength=len(pairs))
        uses = np.maximum(self.popularity_[:num_pairs, :, None] * sum(row.num_tokens for row in rows), 1)
        return (pairs.reshape(num_pairs, num_experts, num_experts) / uses).astype(np.float32)

    def ahead(self, layer: int, used: np.ndarray, state: object) -> np.ndarray:
        """Give in rows of [B, L, E] after `layer` the mean of what followed each expert used in row `layer`."""
        self._check()
        out = np.zeros((len(used), *self.spec.shape), dtype=np.float32)
        before = used[:, layer] if layer >= 0 else np.zeros((len(used), out.shape[2]), dtype=np.float32)
        num_used = before.sum(-1, keepdims=True)
        for row in range(layer + 1, min(layer + 1 + self.reach, out.shape[1])):
            mean = before @ self.following_[row - layer - 1][layer] if layer >= 0 else before
            out[:, row] = np.where(num_used > 0, mean / np.maximum(num_used, 1), self.popularity_[row])
        return out

    def sequence_ahead(self, used: np.ndarray) -> np.ndarray:
        """Give float32 [T, L, E]: of each row what `ahead` gives from the row before it; the first row is 0."""
        self._check()
        before = used.swapaxes(0, 1)[:-1]  # [L - 1, T, E]
        num_used = before.sum(-1, keepdims=True)
        mean = before @ self.following_[0] / np.maximum(num_used, 1)
        out = np.zeros(used.shape, dtype=np.float32)
        out[:, 1:] = np.where(num_used > 0, mean, self.popularity_[1:, None]).swapaxes(0, 1)
        return out


class Random(Popularity):
    """Name experts at random: the floor. Fixed by the seed and the number of the step."""

    name = "random"

    def __init__(self, spec: PredictorSpec, seed: int = 0) -> None:
        super().__init__(spec)
        self.seed = seed

    def _fit(self, rows: list[SequenceRouting]) -> None:
        super()._fit(rows)
        self.drawn_: dict[int, np.ndarray] = {}

    def _draw(self, step: int) -> np.ndarray:
        if step in self.drawn_:
            return self.drawn_[step]
        draws = np.random.default_rng([self.seed, step]).random(self.spec.shape, dtype=np.float32)
        draws *= self.popularity_ > 0
        if step < KEPT_DRAWS:
            self.drawn_[step] = draws
        return draws

    def start(self, batch: int) -> object:
        """Give the number of the first step."""
        self._check()
        return 0

    def step(self, step: Step, state: object) -> tuple[Prediction, object]:
        """Give the step's draw, the same for every sequence."""
        self._check()
        assert isinstance(state, int)
        return Prediction(np.repeat(self._draw(state)[None], len(step.token_ids), axis=0)), state + 1

    def predict(self, token_ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
        """Give each position's draw."""
        self._check()
        draws = np.stack([self._draw(t) for t in range(token_ids.shape[1])])
        return np.repeat(draws[None], len(token_ids), axis=0)

    def sequence(self, token_ids: np.ndarray, used: np.ndarray) -> np.ndarray:
        """Give each position's draw; see `Baseline.sequence`."""
        return self.predict(token_ids[None], np.ones((1, len(token_ids)), dtype=bool))[0]


class Oracle(Baseline):
    """Name the true experts: the ceiling. Told the future by `fit`; sequence b of a batch is row b."""

    name = "oracle"

    def _fit(self, rows: list[SequenceRouting]) -> None:
        self.rows_ = [dense(row, self.spec.topology) for row in rows]

    def _truth(self, sequence: int, token: int) -> np.ndarray:
        if sequence >= len(self.rows_) or token >= len(self.rows_[sequence]):
            return np.zeros(self.spec.shape, dtype=np.float32)
        return many_hot(self.rows_[sequence][token : token + 1], self.spec.shape[1])[0]

    def start(self, batch: int) -> object:
        """Give the number of the first step."""
        self._check()
        return 0

    def step(self, step: Step, state: object) -> tuple[Prediction, object]:
        """Give the truth; nothing past the end of a row."""
        self._check()
        assert isinstance(state, int)
        return Prediction(np.stack([self._truth(b, state) for b in range(len(step.token_ids))])), state + 1

    def predict(self, token_ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
        """Give the truth for each position."""
        self._check()
        batch, num_tokens = token_ids.shape
        return np.stack([np.stack([self._truth(b, t) for t in range(num_tokens)]) for b in range(batch)])

    def sequence(self, token_ids: np.ndarray, used: np.ndarray) -> np.ndarray:
        """Give the truth, which is told here; see `Baseline.sequence`."""
        return used.copy()


def popularity(rows: Iterable[SequenceRouting], spec: PredictorSpec) -> np.ndarray:
    """Give the share of tokens that use each expert, float32 [L, E]."""
    num_layers, num_experts = spec.shape
    total, num_tokens = np.zeros(num_layers * num_experts), 0
    for row in rows:
        experts = dense(row, spec.topology)
        entries = experts.astype(np.int64) + np.arange(num_layers)[:, None] * num_experts
        total += np.bincount(entries[experts >= 0], minlength=len(total))
        num_tokens += row.num_tokens
    return (total / num_tokens).astype(np.float32).reshape(num_layers, num_experts)


BASELINES: dict[str, type[Baseline]] = {
    kind.name: kind for kind in (Popularity, PreviousToken, TokenTable, LayerPair, Random, Oracle)
}
