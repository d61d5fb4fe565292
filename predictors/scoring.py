"""Running any predictor over recorded sequences, as it would run in service, and measuring its recall.

Knows the three horizons of the contract; knows no family. Sequences of one batch advance in lock step, longest first,
and leave as they end.
"""

# B batch, T tokens, L MoE layers, E experts, K experts per token

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from ..collect.trace import SequenceRouting
from .base import BatchPredictor, LayerPredictor, Step, TokenPredictor
from .calibration import CalibrationCurve
from .metrics import RecallMeter
from .rows import dense, ids_of, many_hot

Predictor = TokenPredictor | BatchPredictor | LayerPredictor


def scores_of(
    predictor: Predictor, rows: Sequence[SequenceRouting], *, batch: int = 32
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Give (scores [T, L, E], true experts [T, L, K]) per sequence, in order of length, longest first.

    For the layer horizon the first MoE layer has no prediction: its true experts are given as -1.
    """
    ordered = sorted(rows, key=lambda row: -row.num_tokens)
    for start in range(0, len(ordered), batch):
        chunk = ordered[start : start + batch]
        truth = [dense(row, predictor.spec.topology) for row in chunk]
        if isinstance(predictor, TokenPredictor):
            yield from _token(predictor, chunk, truth)
        elif isinstance(predictor, BatchPredictor):
            yield from _batch(predictor, chunk, truth)
        else:
            yield from _layer(predictor, truth)


def _token(
    predictor: TokenPredictor, rows: list[SequenceRouting], truth: list[np.ndarray]
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    longest, num_experts = rows[0].num_tokens, predictor.spec.shape[1]
    ids = np.full((len(rows), longest), -1, dtype=np.int64)
    hot = np.zeros((len(rows), longest, *predictor.spec.shape), dtype=np.float32)
    for index, row in enumerate(rows):
        ids[index, : row.num_tokens] = ids_of(row)
        hot[index, : row.num_tokens] = many_hot(truth[index], num_experts)
    scores = np.empty_like(hot)
    state, previous = predictor.start(len(rows)), np.zeros_like(hot[:, 0])
    for t in range(longest):
        scores[:, t], state = predictor.step(Step(ids[:, t], previous), state)
        previous = hot[:, t]
    for index, row in enumerate(rows):
        yield scores[index, : row.num_tokens], truth[index]


def _batch(
    predictor: BatchPredictor, rows: list[SequenceRouting], truth: list[np.ndarray]
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    longest = rows[0].num_tokens
    ids = np.full((len(rows), longest), -1, dtype=np.int64)
    mask = np.zeros(ids.shape, dtype=bool)
    for index, row in enumerate(rows):
        ids[index, : row.num_tokens], mask[index, : row.num_tokens] = ids_of(row), True
    scores = predictor.predict(ids, mask)
    for index, row in enumerate(rows):
        yield scores[index, : row.num_tokens], truth[index]


def _layer(predictor: LayerPredictor, truth: list[np.ndarray]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    for experts in truth:
        hot = many_hot(experts, predictor.spec.shape[1])
        scores = np.zeros_like(hot)
        for layer in range(hot.shape[1] - 1):
            scores[:, layer + 1] = predictor.ahead(layer, hot[:, layer])
        wanted = experts.copy()
        wanted[:, 0] = -1
        yield scores, wanted


def measure(
    predictor: Predictor,
    rows: Sequence[SequenceRouting],
    *,
    calibration: CalibrationCurve | None = None,
    batch: int = 32,
) -> RecallMeter:
    """Measure recall over sequences, and calibration where a curve is given."""
    num_experts = predictor.spec.shape[1]
    meter = RecallMeter(num_experts)
    for scores, experts in scores_of(predictor, rows, batch=batch):
        meter.add(scores, experts)
        if calibration is not None:
            sizes = [predictor.spec.topology.layers[index].num_experts for index in predictor.spec.layers]
            exists = np.arange(num_experts)[None] < np.array(sizes)[:, None]
            calibration.add(scores[:, exists], many_hot(experts, num_experts)[:, exists])
    return meter


def own_k(predictor: Predictor) -> list[int]:
    """Give each served layer's own top-k."""
    return [predictor.spec.topology.layers[index].top_k for index in predictor.spec.layers]
