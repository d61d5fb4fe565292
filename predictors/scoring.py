"""Running any predictor over recorded sequences, as it would run in service, and measuring its recall.

Knows the three horizons of the contract; knows no family. Sequences of one batch advance in lock step, longest first,
and leave as they end.
"""

# B batch, T tokens, L MoE layers, E experts, K experts per token

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..collect.errors import BundleError
from ..collect.trace import SequenceRouting
from .base import BatchPredictor, Horizon, LayerPredictor, Predictor, PredictorSpec, Step, TokenPredictor
from .calibration import CalibrationCurve
from .metrics import RecallMeter
from .rows import dense, hidden_of, ids_of, many_hot

BATCH_BYTES = 64 * 2**20  # of one array of scores of sequences that advance together; a handful exist at a time
SHRINK = 0.8  # a batch is cut to the sequences that go on once fewer than this share do
JOINED_TOKENS, JOINED_BYTES = 256, 16 * 2**20  # of states that one call for a layer ahead takes together


class Scores(NamedTuple):
    """What a predictor said of one sequence."""

    row: SequenceRouting
    """The sequence."""
    experts: np.ndarray
    """int16 [T, L, K], its true experts, -1 for none."""
    by_horizon: dict[Horizon, np.ndarray]
    """float32 [T, L, E] each: at the predictor's horizon, and at the token horizon for one of the layer horizon, whose
    own scores are 0 in the first row: no layer stands before it."""
    reuse: np.ndarray | None
    """float32 [T, L, E], None without a reuse head."""

    def truth(self, horizon: Horizon) -> np.ndarray:
        """Give the true experts that a horizon can be measured by: without the first row for the layer horizon."""
        if horizon != "layer":
            return self.experts
        wanted = self.experts.copy()
        wanted[:, 0] = -1
        return wanted


def horizons_of(predictor: Predictor) -> tuple[Horizon, ...]:
    """Give the horizons at which a predictor can be measured, its own first."""
    own = predictor.spec.horizon
    return (own, "token") if own == "layer" else (own,)


def scores_of(predictor: Predictor, rows: Sequence[SequenceRouting], *, batch: int = 32) -> Iterator[Scores]:
    """Give what a predictor says of each sequence, in order of length, longest first.

    Args:
        batch: sequences that advance together; fewer where they are so long that their scores would not fit
            `BATCH_BYTES`.

    Raises:
        BundleError: if a score is nan or infinite.
    """
    ordered = sorted(rows, key=lambda row: -row.num_tokens)
    cells = int(np.prod(predictor.spec.shape))
    start = 0
    while start < len(ordered):
        fit = BATCH_BYTES // (4 * cells * max(1, ordered[start].num_tokens))
        chunk = ordered[start : start + max(1, min(batch, fit))]
        start += len(chunk)
        for item in _scored(predictor, chunk):
            _check_finite(predictor, item)
            yield item


def _scored(predictor: Predictor, rows: list[SequenceRouting]) -> Iterator[Scores]:
    """Give what a predictor says of rows that advance together, the longest first."""
    truth = [dense(row, predictor.spec.topology) for row in rows]
    reuse: np.ndarray | None = None
    if hasattr(predictor, "sequence"):  # free predictors know a shortcut through a recorded sequence
        for row, experts in zip(rows, truth, strict=True):
            yield Scores(row, experts, _at_once(predictor, row, experts), None)
        return
    ids, mask = _padded_ids(rows)
    if predictor.spec.horizon == "batch":
        assert isinstance(predictor, BatchPredictor)
        scores: dict[Horizon, np.ndarray] = {"batch": predictor.predict(ids, mask)}
    else:
        assert isinstance(predictor, TokenPredictor)
        scores, reuse = _stepped(predictor, ids, truth)
    for index, (row, experts) in enumerate(zip(rows, truth, strict=True)):
        own: dict[Horizon, np.ndarray] = {name: value[index, : row.num_tokens] for name, value in scores.items()}
        yield Scores(row, experts, own, None if reuse is None else reuse[index, : row.num_tokens])


def _at_once(predictor: Any, row: SequenceRouting, experts: np.ndarray) -> dict[Horizon, np.ndarray]:
    used = many_hot(experts, predictor.spec.shape[1])
    scores = predictor.sequence(ids_of(row), used)
    if predictor.spec.horizon == "layer":
        hidden = [hidden_of(row, predictor.spec.topology)] if getattr(predictor, "needs_hidden", False) else []
        return {"layer": predictor.sequence_ahead(used, *hidden), "token": scores}
    return {predictor.spec.horizon: scores}


def _check_finite(predictor: Predictor, item: Scores) -> None:
    for scores in (*item.by_horizon.values(), *([] if item.reuse is None else [item.reuse])):
        if not np.isfinite(scores).all():
            wrong = ~np.isfinite(scores)
            token = int(np.argwhere(wrong)[0, 0])
            raise BundleError(
                f"The predictor {predictor.spec.family} gives the score {scores[wrong][0]} (token {token} of sequence "
                f"{item.row.sequence!r}), where finite numbers are legal; its training diverged or its weights are "
                "damaged: export another checkpoint."
            )


def _padded_ids(rows: list[SequenceRouting]) -> tuple[np.ndarray, np.ndarray]:
    ids = np.full((len(rows), rows[0].num_tokens), -1, dtype=np.int64)
    mask = np.zeros(ids.shape, dtype=bool)
    for index, row in enumerate(rows):
        ids[index, : row.num_tokens], mask[index, : row.num_tokens] = ids_of(row), True
    return ids, mask


def _stepped(
    predictor: TokenPredictor, ids: np.ndarray, truth: list[np.ndarray]
) -> tuple[dict[Horizon, np.ndarray], np.ndarray | None]:
    """Give [B, T, L, E] by horizon, and of reuse; 0 behind the end of a sequence."""
    num_layers, num_experts = predictor.spec.shape
    hot = np.zeros((*ids.shape, num_layers, num_experts), dtype=np.float32)
    for index, experts in enumerate(truth):
        hot[index, : len(experts)] = many_hot(experts, num_experts)
    lengths = np.array([len(experts) for experts in truth])
    token, reuse = np.zeros_like(hot), None
    ahead = _Ahead(predictor, hot) if predictor.spec.horizon == "layer" else None
    active, state = len(ids), predictor.start(len(ids))
    for t in range(ids.shape[1]):
        left = int((lengths > t).sum())
        if left < SHRINK * active and isinstance(state, dict):  # those that ended stand last
            active, state = left, {name: _like(value, _array(value)[:left]) for name, value in state.items()}
        previous = hot[:active, t - 1] if t else np.zeros_like(hot[:active, 0])
        given, state = predictor.step(Step(ids[:active, t], previous), state)
        token[:active, t] = given.routing
        if given.reuse is not None:
            reuse = np.zeros_like(hot) if reuse is None else reuse
            reuse[:active, t] = given.reuse
        if ahead is not None:
            ahead.add(t, active, state)
    if ahead is None:
        return {"token": token}, reuse
    ahead.flush()
    return {"layer": ahead.scores, "token": token}, reuse


class _Ahead:
    """Ask for each layer from the one before it, many tokens at a time where their states can be joined."""

    def __init__(self, predictor: TokenPredictor, hot: np.ndarray) -> None:
        assert isinstance(predictor, LayerPredictor)
        self.predictor, self.hot, self.scores = predictor, hot, np.zeros_like(hot)
        self.waiting: list[tuple[int, int, Any]] = []  # step, sequences, state
        self.asked: set[str] | None = None  # what the predictor takes from a state, once that is known

    def add(self, t: int, active: int, state: Any) -> None:
        """Note the state that a step left."""
        self.waiting.append((t, active, state))
        if self.asked is None or not isinstance(state, dict):
            self.flush()
            return
        held = sum(_array(state[name]).nbytes for name in self.asked) * len(self.waiting)
        if held >= JOINED_BYTES or sum(size for _, size, _ in self.waiting) >= JOINED_TOKENS:
            self.flush()

    def flush(self) -> None:
        """Ask for all layers of the tokens that wait."""
        if not self.waiting:
            return
        used = np.concatenate([self.hot[:size, t] for t, size, _ in self.waiting])
        states = [state for _, _, state in self.waiting]
        state = _Joined(states) if isinstance(states[0], dict) else states[0]
        for layer in range(used.shape[1] - 1):
            given, start = self.predictor.ahead(layer, used, state)[:, layer + 1], 0
            for t, size, _ in self.waiting:
                self.scores[:size, t, layer + 1] = given[start : start + size]
                start += size
        if isinstance(state, dict):
            self.asked = set(state)
        self.waiting.clear()


class _Joined(dict[str, Any]):
    """States of several steps as one; what is asked for by name is joined then, so that nothing large is in vain."""

    def __init__(self, states: list[dict[str, Any]]) -> None:
        super().__init__()
        self.states = states

    def __missing__(self, name: str) -> Any:
        # Rings become arrays: each layer would copy theirs again, which takes three times as long at 64 MiB.
        self[name] = np.concatenate([_array(state[name]) for state in self.states])
        return self[name]


def _array(value: Any) -> np.ndarray:
    """Give an entry of a state as an array; what is no array, as a ring, gives one."""
    return value if isinstance(value, np.ndarray) else value.array()


def _like(value: Any, array: np.ndarray) -> Any:
    """Make an entry of the same kind of an array."""
    return array if isinstance(value, np.ndarray) else type(value)(array)


def measure(
    predictor: Predictor,
    rows: Sequence[SequenceRouting],
    *,
    horizon: Horizon | None = None,
    calibration: CalibrationCurve | None = None,
    batch: int = 32,
) -> RecallMeter:
    """Measure recall at a horizon, by default the predictor's own, and calibration where a curve is given."""
    num_experts, horizon = predictor.spec.shape[1], horizon or predictor.spec.horizon
    meter = RecallMeter(num_experts)
    for item in scores_of(predictor, rows, batch=batch):
        scores, experts = item.by_horizon[horizon], item.truth(horizon)
        meter.add(scores, experts)
        if calibration is not None:
            exists = exists_in(predictor.spec, experts)
            calibration.add(scores[:, exists], many_hot(experts, num_experts)[:, exists])
    return meter


def own_k(predictor: Predictor) -> list[int]:
    """Give each served layer's own top-k."""
    return [predictor.spec.topology.layers[index].top_k for index in predictor.spec.layers]


def exists_in(spec: PredictorSpec, experts_TLK: np.ndarray) -> np.ndarray:
    """Give bool [L, E]: experts that exist, of layers that have true experts at all."""
    sizes = np.array([spec.topology.layers[index].num_experts for index in spec.layers])
    present = (experts_TLK >= 0).any(axis=(0, 2))
    return (np.arange(spec.shape[1])[None] < sizes[:, None]) & np.asarray(present)[:, None]
