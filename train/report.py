"""What a predictor is worth on sequences it has not seen: recall beside the free baselines, with an interval.

Knows predictors by their contract and rows of traces; knows no training and no files.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..collect.trace import SequenceRouting
from ..predictors.base import Predictor, PredictorSpec
from ..predictors.baselines import BASELINES, Baseline
from ..predictors.calibration import CalibrationCurve
from ..predictors.metrics import RecallMeter
from ..predictors.rows import group_of
from ..predictors.scoring import measure, own_k

# The layer pair exists one layer ahead only: it is shown as a neighbour, not as something that could take the place.
FREE = {
    "token": ("random", "popularity", "previous_token", "token_table", "layer_pair"),
    "batch": ("random", "popularity", "token_table"),
}
FURTHER_K = (1, 3)


def measured(predictor: Predictor, rows: Sequence[SequenceRouting], baselines: dict[str, float]) -> dict[str, Any]:
    """Measure a predictor on rows.

    Returns:
        {"recall_at_k" (each layer's own top-k), "interval", "recall_at" {k: recall}, "per_layer", "baselines",
        "calibration", "sequences", "tokens"}
    """
    curve = CalibrationCurve()
    meter = measure(predictor, rows, calibration=curve)
    k = own_k(predictor)
    low, high = meter.interval(k)
    wanted = sorted({*FURTHER_K, *k, *(2 * each for each in k)})
    return {
        "recall_at_k": round(meter.recall(k), 5),
        "interval": [round(low, 5), round(high, 5)],
        "recall_at": {str(each): round(meter.recall(each), 5) for each in wanted if each <= meter.num_experts},
        "per_layer": [round(float(value), 5) for value in meter.per_layer(k)],
        "baselines": baselines,
        "calibration": curve.to_json(),
        "sequences": len(rows),
        "tokens": sum(row.num_tokens for row in rows),
    }


def free_baselines(
    spec: PredictorSpec, fitted_on: Sequence[SequenceRouting], rows: Sequence[SequenceRouting]
) -> dict[str, float]:
    """Give the recall of each free baseline on rows, fitted on other rows."""
    return _over(spec, lambda kind: [measure(_fitted(kind, spec, fitted_on), rows)])


def crossed_baselines(spec: PredictorSpec, rows: Sequence[SequenceRouting]) -> dict[str, float]:
    """Give the recall of each free baseline on rows that have no others to fit on: each half fitted on the other.

    That flatters the baselines: they know the text's domain, which the predictor may not.
    """
    groups = list(dict.fromkeys(map(group_of, rows)))
    first = set(groups[::2])
    halves = [[row for row in rows if (group_of(row) in first) == wanted] for wanted in (True, False)]
    if not all(halves):
        return {}

    def meters(kind: type[Baseline]) -> list[RecallMeter]:
        return [measure(_fitted(kind, spec, halves[1 - index]), halves[index]) for index in (0, 1)]

    return _over(spec, meters)


def _over(spec: PredictorSpec, meters: Callable[[type[Baseline]], list[RecallMeter]]) -> dict[str, float]:
    found = {}
    k = [spec.topology.layers[index].top_k for index in spec.layers]
    for name in FREE[spec.horizon]:
        if name == "layer_pair" and len(spec.layers) < 2:
            continue
        both = RecallMeter(spec.shape[1])
        for meter in meters(BASELINES[name]):
            both.counts += meter.counts
        found[name] = round(both.recall(k), 5)
    return found


def _fitted(kind: type[Baseline], spec: PredictorSpec, rows: Sequence[SequenceRouting]) -> Any:
    horizon = "layer" if kind.name == "layer_pair" else spec.horizon
    return kind(
        PredictorSpec(
            family=kind.name,
            horizon=horizon,
            topology=spec.topology,
            stack=spec.stack,
            vocab_size=spec.vocab_size,
        )
    ).fit(rows)
