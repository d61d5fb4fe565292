"""Evaluating a bundle on a trace, on those of its sequences that training has not seen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..collect.errors import DataError
from ..collect.trace import Trace
from ..predictors.bundle import Bundle, load_predictor
from ..predictors.rows import fingerprint, join_parts
from .report import crossed_baselines, free_baselines, measured


def evaluate(bundle: str | Path, trace: str | Path) -> dict[str, Any]:
    """Measure a bundle on a trace.

    Baselines are fitted on the trace's sequences that training saw, where there are any, else by halves.

    Returns:
        {"horizons": {HORIZON: {...}}, "recall_at_k", "recall_at", "baselines", "interval", "recovered_share",
        "latency_ms", "sequences", "tokens", "left_out", "baselines_fitted_on"}, the first ones being those of the
        bundle's horizon.

    Raises:
        BundleError: if the bundle is damaged or made for another topology.
        TraceError: if the trace cannot be read.
        DataError: if training saw all of its sequences.
    """
    opened, source = Bundle.open(bundle), Trace.open(trace)
    opened.require(source.topology, source.header.model_fingerprint)
    spec, known = opened.spec, opened.training_sequences()
    rows = [row for row in join_parts(source.rows(spec.stack)) if row.num_tokens > 1]
    seen = [row for row in rows if fingerprint(row) in known]
    fresh = [row for row in rows if fingerprint(row) not in known]
    if not fresh:
        raise DataError(
            f"{trace} has no sequence of two tokens or more that training of {bundle} has not seen ({len(seen)} were "
            "seen); evaluate on a trace of other text."
        )
    baselines = free_baselines(spec, seen, fresh) if seen else crossed_baselines(spec, fresh)
    report = measured(load_predictor(opened), fresh, baselines)
    same = ("recall_at_k", "recall_at", "baselines", "interval", "sequences", "tokens")
    return {
        "family": spec.family,
        "horizons": {spec.horizon: report},
        **{name: report[name] for name in same},
        "recovered_share": None,  # needs a reuse head
        "latency_ms": opened.card["latency_ms"],
        "left_out": len(seen),
        "baselines_fitted_on": "sequences of this trace that training saw" if seen else "the other half of this trace",
    }
