"""Evaluating a bundle on a trace, on those of its sequences that training has not seen."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..collect.errors import DataError, SettingError
from ..collect.trace import SequenceRouting, Trace
from ..predictors.base import BatchPredictor, LayerPredictor, Predictor, Step, TokenPredictor
from ..predictors.bundle import Bundle, load_predictor
from ..predictors.rows import dense, fingerprint, ids_of, join_parts, many_hot
from .report import headline, measured

TIMED_RUNS, WARMUP_RUNS = 200, 10
TIMED_TOKENS = 128  # of a sequence that is predicted at once

Recover = Callable[[Predictor, Sequence[SequenceRouting]], float | None]


def evaluate(
    bundle: str | Path, trace: str | Path, *, by: str | None = None, recover: Recover | None = None
) -> dict[str, Any]:
    """Measure a bundle on a trace.

    Free predictors are fitted on the trace's sequences that training saw, where there are any, else by halves.

    Args:
        by: "category" to add rows for each category of the trace.
        recover: gives the recovered share of a predictor with a reuse head on rows in the trace's order; asked only
            where the bundle has one.

    Returns:
        {"horizons": {HORIZON: see `report.measured`}, what `report.headline` gives, "recovered_share", "latency_ms"
        {"p50", "p99"} here and "latency_at_export_ms", "domain" ("in" or "out"), "domain_reason", "left_out",
        "baselines_fitted_on", "notes" of the trace's import}

    Raises:
        BundleError: if the bundle is damaged, made for another topology, or gives nan.
        TraceError: if the trace cannot be read.
        DataError: if training saw all of its sequences.
        SettingError: if rows are asked for by something that the trace does not have.
    """
    opened, source = Bundle.open(bundle), Trace.open(trace)
    opened.require(source.topology, source.header.model_fingerprint)
    spec, known = opened.spec, opened.training_sequences()
    rows = [row for row in join_parts(source.rows(spec.stack)) if row.num_tokens > 1]
    seen, fresh = [], []
    for row in rows:
        (seen if fingerprint(row) in known else fresh).append(row)
    if not any((row.experts[1:] >= 0).any() for row in fresh):
        raise DataError(
            f"{trace} has no sequence of two tokens or more that training of {bundle} has not seen ({len(seen)} were "
            "seen); evaluate on a trace of other text."
        )
    if by is not None:
        _check_categories(by, fresh, trace)
    predictor = load_predictor(opened)
    told = measured(
        predictor,
        fresh,
        seen or None,
        temperatures=opened.card.get("temperature"),
        by_category=by is not None,
    )
    training = opened.card.get("training", {})
    domain, reason = _domain(training, seen, fresh)
    trained_on = training.get("categories") or {}
    for report in told.values() if trained_on else ():
        for row in report.get("by_category", ()):
            row["in_training"] = row["category"] in trained_on
    return {
        "family": spec.family,
        "horizons": told,
        **headline(told),
        "recovered_share": recover(predictor, fresh) if recover is not None and opened.card.get("reuse") else None,
        "latency_ms": latency_ms(predictor, fresh[0]),
        "latency_at_export_ms": opened.card.get("latency_ms"),
        "domain": domain,
        "domain_reason": reason,
        "left_out": len(seen),
        "baselines_fitted_on": "sequences of this trace that training saw" if seen else "the other half of this trace",
        "notes": [note.to_json() for note in source.header.notes],
    }


def sources_of(rows: Iterable[SequenceRouting]) -> list[str]:
    """Name the data sets or files that rows come from, sorted."""
    return sorted({(row.source or "").rpartition(":")[0] for row in rows} - {""})


def categories_of(rows: Iterable[SequenceRouting]) -> dict[str, int]:
    """Count rows by category, those without left out."""
    return dict(sorted(Counter(row.category for row in rows if row.category is not None).items()))


def latency_ms(predictor: Predictor, row: SequenceRouting) -> dict[str, float]:
    """Time one sequence's steps on this machine, or the prediction of its first tokens: {"p50", "p99"}.

    For the layer horizon "ahead_p50" is added, of one layer.
    """
    ids, used = ids_of(row), many_hot(dense(row, predictor.spec.topology), predictor.spec.shape[1])
    if predictor.spec.horizon == "batch":
        assert isinstance(predictor, BatchPredictor)
        batch = ids[None, :TIMED_TOKENS]
        return _quantiles(lambda index, _: predictor.predict(batch, np.ones(batch.shape, bool)), None)
    assert isinstance(predictor, TokenPredictor)
    stepping: TokenPredictor = predictor

    def step(index: int, state: object) -> object:
        place = index % len(ids)
        return stepping.step(Step(ids[place : place + 1], used[place - 1 : place] if place else used[:1] * 0), state)[1]

    found = _quantiles(step, predictor.start(1))
    if predictor.spec.horizon == "layer":
        assert isinstance(predictor, LayerPredictor)
        layered, state = predictor, step(0, predictor.start(1))
        layers = used.shape[1]
        found["ahead_p50"] = _quantiles(lambda i, _: layered.ahead(i % layers, used[:1], state), None)["p50"]
    return found


def _quantiles(run: Callable[[int, Any], Any], state: Any) -> dict[str, float]:
    seconds = []
    for index in range(WARMUP_RUNS + TIMED_RUNS):
        start = time.perf_counter()
        state = run(index, state)
        seconds.append(time.perf_counter() - start)
    p50, p99 = np.quantile(seconds[WARMUP_RUNS:], [0.5, 0.99]) * 1e3
    return {"p50": round(float(p50), 4), "p99": round(float(p99), 4)}


def _check_categories(by: str, rows: list[SequenceRouting], trace: str | Path) -> None:
    if by != "category":
        raise SettingError(f"by must be category, got {by!r}.")
    if not categories_of(rows):
        raise SettingError(
            f"by is category, but no sequence of {trace} has one; leave --by out, or record or import the trace with "
            "its categories."
        )


def _domain(training: dict[str, Any], seen: list[SequenceRouting], fresh: list[SequenceRouting]) -> tuple[str, str]:
    """Say whether rows are of the kind that training saw, and how that is known."""
    theirs, ours = set(training.get("categories") or ()), set(categories_of(fresh))
    if theirs and ours and not theirs & ours:
        return "out", "none of their categories was trained on"
    if seen:
        return "in", f"training saw {len(seen)} other sequences of this trace"
    common = set(training.get("sources") or ()) & set(sources_of(fresh))
    if common:
        return "in", f"training saw other sequences of {min(common)}"
    return "out", "training saw no sequence of this trace, nor of its sources"
