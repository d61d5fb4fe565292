"""What a predictor is worth on sequences it has not seen, beside what is free, at each of its horizons.

Knows predictors by their contract and rows of traces; knows no training and no files. Everything is summed over the
sequences as they stream by; nothing holds the scores of more than a batch of them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from ..collect.trace import SequenceRouting
from ..predictors.base import Horizon, Predictor, PredictorSpec
from ..predictors.baselines import BASELINES, Baseline
from ..predictors.calibration import CalibrationCurve, TemperatureFit, tempered
from ..predictors.rows import group_of, many_hot
from ..predictors.scoring import Scores, exists_in, horizons_of, scores_of
from ..predictors.tally import OWN, Tally, bucket_names
from .misses import capacity_of, missed_by_lru

# What costs nothing at a horizon: at the token horizon no layer of the token is known, before a batch no routing is.
FREE: dict[Horizon, tuple[str, ...]] = {
    "token": ("random", "popularity", "previous_token", "token_table"),
    "layer": ("random", "popularity", "previous_token", "token_table", "layer_pair"),
    "batch": ("random", "popularity", "token_table"),
}
CEILING = "oracle"
DIGITS = 5

Fold = tuple[Sequence[SequenceRouting], Sequence[SequenceRouting]]
"""Rows that free predictors are fitted on, and rows that those are measured on."""
Tallies = dict[Horizon, Tally]


def measured(
    predictor: Predictor,
    rows: Sequence[SequenceRouting],
    fitted_on: Sequence[SequenceRouting] | None,
    *,
    temperatures: Mapping[str, float] | None = None,
    by_category: bool = False,
) -> dict[Horizon, dict[str, Any]]:
    """Measure a predictor on rows, beside the free ones.

    Args:
        rows: whole sequences.
        fitted_on: others that the free predictors are fitted on; None to fit them on one half of the rows for the
            other, which flatters them: they know the text's domain, which the predictor may not.
        temperatures: by horizon, what `temperatures_of` gave on other sequences.
        by_category: add rows for each category of the trace.

    Returns:
        by horizon {"recall_at_k" (each layer's own top-k), "interval", "recall_at" {k: recall}, "precision_at",
        "per_layer", "positions" {bucket: recall}, "budget" {share: recall}, "whole_path", "on_misses", "calibration",
        "baselines" {NAME: recall}, "free" {NAME: as of the predictor}, "oracle", "best_free", "gain", "gain_interval",
        "beats_free", "verdict", "by_category" (where asked for), "sequences", "tokens"}

    Raises:
        BundleError: if the predictor gives nan.
        DataError: if no row has two tokens.
    """
    rows = list(rows)  # rows may be read when asked for, each time as another object
    spec, keys = predictor.spec, {id(row): index for index, row in enumerate(rows)}
    folds = _halves(rows) if fitted_on is None else [(fitted_on, rows)]
    capacity = capacity_of(spec)
    missed = missed_by_lru(rows, spec, capacity)
    own: Tallies = {horizon: Tally(spec) for horizon in _measurable(predictor)}
    curves = {horizon: (CalibrationCurve(), CalibrationCurve()) for horizon in own}
    heat = {horizon: (temperatures or {}).get(horizon, 1.0) for horizon in own}
    for item in scores_of(predictor, rows):
        _count(own, item, keys[id(item.row)], missed)
        for horizon in own:
            before, after = curves[horizon]
            said, used = _existing(spec, item, horizon)
            before.add(said, used)
            after.add(tempered(said, heat[horizon]), used)
    free = {name: _free_tallies(name, spec, tuple(own), folds, keys, missed) for name in BASELINES} if folds else {}
    told = {}
    for horizon, tally in own.items():
        beside = {name: tallies[horizon] for name, tallies in free.items() if horizon in tallies}
        before, after = curves[horizon]
        told[horizon] = {
            **_figures(tally, capacity),
            **_compared(tally, {name: other for name, other in beside.items() if name != CEILING}, horizon),
            "free": {name: _figures(other, capacity) for name, other in beside.items() if name != CEILING},
            CEILING: _figures(beside[CEILING], capacity) if beside else None,
            "calibration": {
                **before.to_json(),
                "temperature": round(heat[horizon], DIGITS),
                "after": after.to_json(),
            },
            "sequences": len(rows),
            "tokens": sum(row.num_tokens for row in rows),
        }
        if by_category:
            told[horizon]["by_category"] = _categories(rows, tally, beside)
    return told


def temperatures_of(predictor: Predictor, rows: Sequence[SequenceRouting]) -> dict[str, float]:
    """Fit one temperature per horizon, on sequences that are neither trained nor tested on."""
    horizons = _measurable(predictor)
    fits = [TemperatureFit() for _ in horizons]
    for item in scores_of(predictor, rows):
        for horizon, fit in zip(horizons, fits, strict=True):
            fit.add(*_existing(predictor.spec, item, horizon))
    return {horizon: round(fit.temperature(), DIGITS) for horizon, fit in zip(horizons, fits, strict=True)}


def headline(told: Mapping[Horizon, Mapping[str, Any]]) -> dict[str, Any]:
    """Give what `measured` says first: recall at the token horizon where there is one, whether it beats what is free.

    Returns:
        {"recall_at_k", "recall_at", "precision_at", "baselines", "interval", "sequences", "tokens"} of the token
        horizon, else of the predictor's own, and {"best_free", "beats_free", "verdict"} of its own.
    """
    own = next(iter(told.values()))
    shown = told.get("token", own)
    names = ("recall_at_k", "recall_at", "precision_at", "baselines", "interval", "sequences", "tokens")
    return {name: shown[name] for name in names} | {name: own[name] for name in ("best_free", "beats_free", "verdict")}


def _measurable(predictor: Predictor) -> tuple[Horizon, ...]:
    """Give the horizons of a predictor, its own first; a model of one layer has none ahead."""
    single = len(predictor.spec.layers) < 2
    return tuple(horizon for horizon in horizons_of(predictor) if not (single and horizon == "layer"))


def _halves(rows: Sequence[SequenceRouting]) -> list[Fold]:
    """Give folds of two halves, whole groups each; none for a single group."""
    groups = list(dict.fromkeys(map(group_of, rows)))
    first = set(groups[::2])
    halves = [[row for row in rows if (group_of(row) in first) == wanted] for wanted in (True, False)]
    return [(halves[1], halves[0]), (halves[0], halves[1])] if all(halves) else []


def _free_tallies(
    name: str,
    spec: PredictorSpec,
    horizons: Sequence[Horizon],
    folds: Sequence[Fold],
    keys: Mapping[int, int],
    missed: Sequence[np.ndarray | None],
) -> Tallies:
    """Measure a free predictor at the horizons at which it exists; what is known before a token also is within it."""
    tallies: Tallies = {}
    for horizon in horizons:
        if name == CEILING or name in FREE[horizon]:
            tallies[horizon] = Tally(spec)
    if name == "layer_pair" and "layer" not in tallies:
        return {}
    for fitted, rows in folds:
        free = _fitted(BASELINES[name], spec, rows if name == CEILING else fitted)
        for item in scores_of(free, rows):
            known = item.by_horizon["batch" if spec.horizon == "batch" else "token"]
            spread = {horizon: item.by_horizon.get(horizon, known) for horizon in horizons}
            _count(tallies, item._replace(by_horizon=spread), keys[id(item.row)], missed)
    return tallies


def _fitted(kind: type[Baseline], spec: PredictorSpec, rows: Sequence[SequenceRouting]) -> Any:
    within = "batch" if spec.horizon == "batch" else "token"
    made = PredictorSpec(
        family=kind.name,
        horizon="layer" if kind.name == "layer_pair" else within,
        topology=spec.topology,
        stack=spec.stack,
        vocab_size=spec.vocab_size,
    )
    return kind(made).fit(rows)


def _count(tallies: Tallies, item: Scores, key: int, missed: Sequence[np.ndarray | None]) -> None:
    for horizon, tally in tallies.items():
        tally.add(key, item.by_horizon[horizon], item.truth(horizon), missed[key])


def _existing(spec: PredictorSpec, item: Scores, horizon: Horizon) -> tuple[np.ndarray, np.ndarray]:
    """Give what was said of experts that exist, and whether it came true."""
    experts = item.truth(horizon)
    exists = exists_in(spec, experts)
    return item.by_horizon[horizon][:, exists], many_hot(experts, spec.shape[1])[:, exists]


def _figures(tally: Tally, capacity: int) -> dict[str, Any]:
    positions, (misses, on_misses) = tally.positions(), tally.on_misses()
    return {
        "recall_at_k": round(tally.recall(), DIGITS),
        "interval": [round(end, DIGITS) for end in tally.interval()],
        "recall_at": {column: round(tally.recall(column), DIGITS) for column in tally.columns},
        "precision_at": {column: round(tally.precision(column), DIGITS) for column in tally.columns},
        "per_layer": _rounded(tally.per_layer()),
        "positions": dict(zip(bucket_names(len(positions)), _rounded(positions), strict=True)),
        "budget": {share: round(recall, DIGITS) for share, recall in tally.budgets().items()},
        "whole_path": {factor: round(share, DIGITS) for factor, share in tally.whole_path().items()},
        "on_misses": {"capacity": capacity, "misses": misses, "recall_at_k": _rounded([on_misses])[0]},
    }


def _compared(tally: Tally, free: Mapping[str, Tally], horizon: Horizon) -> dict[str, Any]:
    """Set a predictor beside the best of what is free at the same horizon."""
    recalls = {name: round(other.recall(), DIGITS) for name, other in free.items()}
    if not free:
        sentence = "No free predictor could be fitted: that needs two groups of sequences, or some that training saw."
        return {
            "baselines": {},
            "best_free": None,
            "gain": None,
            "gain_interval": None,
            "beats_free": False,
            "verdict": sentence,
        }
    best = max(recalls, key=lambda name: free[name].recall())
    gain, (low, high) = tally.gain(free[best])
    beats = low > 0 and len(tally.sequences) > 1  # one sequence drawn again and again says nothing of others
    does = "beats" if beats else "does not beat"
    return {
        "baselines": recalls,
        "best_free": best,
        "gain": round(gain, DIGITS),
        "gain_interval": [round(low, DIGITS), round(high, DIGITS)],
        "beats_free": beats,
        "verdict": (
            f"At the {horizon} horizon it {does} what is free: recall {tally.recall():.3f} against {recalls[best]:.3f} "
            f"of the {best.replace('_', ' ')}, a difference of {gain:+.3f} ({low:+.3f} to {high:+.3f}, 95 % over "
            "sequences)."
        ),
    }


def _categories(rows: Sequence[SequenceRouting], tally: Tally, beside: Mapping[str, Tally]) -> list[dict[str, Any]]:
    places: dict[str, set[int]] = {}
    for index, row in enumerate(rows):
        places.setdefault(row.category or "", set()).add(index)

    def recall(of: Tally, kept: Collection[int]) -> float:
        return round(of.recall(OWN, kept), DIGITS)

    return [
        {
            "category": name,
            "sequences": len(kept),
            "tokens": sum(rows[index].num_tokens for index in kept),
            "recall_at_k": recall(tally, kept),
            "interval": [round(end, DIGITS) for end in tally.interval(OWN, kept)],
            "baselines": {free: recall(other, kept) for free, other in beside.items() if free != CEILING},
        }
        for name, kept in sorted(places.items())
    ]


def _rounded(values: Sequence[float | None]) -> list[float | None]:
    return [None if value is None else round(value, DIGITS) for value in values]
