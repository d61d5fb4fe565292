"""Running any predictor over recorded sequences, as it would run in service, and measuring its recall.

Knows the three horizons of the contract; knows no family. Sequences of one batch advance in lock step, longest first,
and leave as they end.
"""

# B batch, T tokens, L MoE layers, E experts, K experts per token

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from ..collect.trace import SequenceRouting
from .base import BatchPredictor, Horizon, LayerPredictor, Predictor, Step, TokenPredictor
from .calibration import CalibrationCurve
from .metrics import RecallMeter
from .rows import dense, ids_of, many_hot


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
    """Give what a predictor says of each sequence, in order of length, longest first."""
    ordered = sorted(rows, key=lambda row: -row.num_tokens)
    for start in range(0, len(ordered), batch):
        chunk = ordered[start : start + batch]
        truth = [dense(row, predictor.spec.topology) for row in chunk]
        ids, mask = _padded_ids(chunk)
        if predictor.spec.horizon == "batch":
            assert isinstance(predictor, BatchPredictor)
            scores, reuse = {"batch": predictor.predict(ids, mask)}, None
        else:
            assert isinstance(predictor, TokenPredictor)
            scores, reuse = _stepped(predictor, ids, truth)
        for index, (row, experts) in enumerate(zip(chunk, truth, strict=True)):
            own: dict[Horizon, np.ndarray] = {name: value[index, : row.num_tokens] for name, value in scores.items()}  # type: ignore[misc]
            yield Scores(row, experts, own, None if reuse is None else reuse[index, : row.num_tokens])


def _padded_ids(rows: list[SequenceRouting]) -> tuple[np.ndarray, np.ndarray]:
    ids = np.full((len(rows), rows[0].num_tokens), -1, dtype=np.int64)
    mask = np.zeros(ids.shape, dtype=bool)
    for index, row in enumerate(rows):
        ids[index, : row.num_tokens], mask[index, : row.num_tokens] = ids_of(row), True
    return ids, mask


def _stepped(
    predictor: TokenPredictor, ids: np.ndarray, truth: list[np.ndarray]
) -> tuple[dict[str, np.ndarray], np.ndarray | None]:
    """Give [B, T, L, E] by horizon, and of reuse."""
    num_layers, num_experts = predictor.spec.shape
    hot = np.zeros((*ids.shape, num_layers, num_experts), dtype=np.float32)
    for index, experts in enumerate(truth):
        hot[index, : len(experts)] = many_hot(experts, num_experts)
    token, reuse = np.empty_like(hot), None
    ahead = np.zeros_like(hot) if predictor.spec.horizon == "layer" else None
    state, previous = predictor.start(len(ids)), np.zeros_like(hot[:, 0])
    for t in range(ids.shape[1]):
        given, state = predictor.step(Step(ids[:, t], previous), state)
        token[:, t], previous = given.routing, hot[:, t]
        if given.reuse is not None:
            reuse = np.empty_like(hot) if reuse is None else reuse
            reuse[:, t] = given.reuse
        if ahead is not None:
            assert isinstance(predictor, LayerPredictor)
            for layer in range(num_layers - 1):
                ahead[:, t, layer + 1] = predictor.ahead(layer, hot[:, t], state)[:, layer + 1]
    return {"token": token} if ahead is None else {"layer": ahead, "token": token}, reuse


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
            sizes = [predictor.spec.topology.layers[index].num_experts for index in predictor.spec.layers]
            present = (experts >= 0).any(axis=(0, 2))
            exists = (np.arange(num_experts)[None] < np.array(sizes)[:, None]) & np.asarray(present)[:, None]
            calibration.add(scores[:, exists], many_hot(experts, num_experts)[:, exists])
    return meter


def own_k(predictor: Predictor) -> list[int]:
    """Give each served layer's own top-k."""
    return [predictor.spec.topology.layers[index].top_k for index in predictor.spec.layers]
