"""From a trained module to a bundle with its card: metrics beside the free predictors, split, data, checksums.

Knows modules, data and bundles; knows nothing of the training loop.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..collect.errors import DataError, TraceError
from ..predictors.base import Predictor
from ..predictors.bundle import Bundle, check_target
from ..predictors.bundle_writer import write_bundle
from .data import TraceData
from .evaluate import categories_of, sources_of
from .module import PredictorModule
from .report import headline, measured, temperatures_of
from .split import SplitSettings
from .starting_point import sizes_of

KEPT_OF_FREE = ("recall_at_k", "interval", "recall_at")  # on the card, the best one aside, which is kept whole
MOST_NAMES = 20  # sources and categories listed on the card


def export(module: PredictorModule, data: TraceData, out: str | Path, run: dict[str, Any] | None = None) -> Bundle:
    """Write the bundle of a trained module, measured on the data's test sequences.

    A temperature per horizon is fitted on the validation sequences. A predictor that does not beat what is free at its
    horizon is exported too; its card says so.

    Raises:
        BundleError: if the exported graph differs from the network, or `out` is no place for a bundle.
    """
    check_target(Path(out))  # measuring takes a while

    def describe(predictor: Predictor) -> dict[str, Any]:
        temperatures = temperatures_of(predictor, data.rows["validation"])
        told = measured(predictor, data.rows["test"], data.fitting_rows, temperatures=temperatures, by_category=True)
        first = headline(told)
        return {
            "metrics": first | {"horizons": {horizon: _short(report) for horizon, report in told.items()}},
            "calibration": next(iter(told.values()))["calibration"],
            "temperature": temperatures,
            "beats_free": first["beats_free"],
            "verdict": first["verdict"],
        }

    header = data.header
    card = {
        "model": header.model,
        "model_fingerprint": header.model_fingerprint,
        "tokenizer_fingerprint": header.tokenizer_fingerprint,
        "training": {
            "trace": data.trace_path.name,
            "sources": sources_of(data.fitting_rows)[:MOST_NAMES],
            "categories": categories_of(data.fitting_rows),
            "split": asdict(data.split),
            "sequences": {part: len(rows) for part, rows in data.rows.items()},
            "tokens": {part: sum(row.num_tokens for row in rows) for part, rows in data.rows.items()},
            "rates": module.rates,
            **(run or {}),
        },
    }
    real, trained_on = data.rows["test"], data.fitting_rows
    return write_bundle(
        out, module.network, card=card, describe=describe, real=real, trained_on=trained_on, seen=module.seen.tolist()
    )


def _short(report: Mapping[str, Any]) -> dict[str, Any]:
    """Keep of the free predictors what a reader compares, and all of the best; categories only where there are any."""
    free = {
        name: dict(figures)
        if name == report["best_free"]
        else {key: value for key, value in figures.items() if key in KEPT_OF_FREE}
        for name, figures in report["free"].items()
    }
    known = [row for row in report["by_category"] if row["category"]]
    return {**report, "free": free, "by_category": known}


def data_of(module: PredictorModule, trace: str | Path | None = None) -> TraceData:
    """Rebuild the data that a module was trained on, from its checkpoint's notes.

    Raises:
        DataError: if the trace is not where it was and no other place is given.
    """
    settings = dict(module.data_settings)
    split = SplitSettings(**settings.pop("split"))
    if trace is not None:
        settings["trace"] = str(trace)
    data = TraceData(**settings, split=split)
    try:
        data.setup()
    except TraceError as error:
        raise DataError(
            f"The trace that the predictor was trained on cannot be read ({error}) Name it by --trace."
        ) from error
    if not data.header.topology.same_routing(module.network.spec.topology):
        raise DataError(
            f"{data.trace_path} has {data.header.topology.describe()}, but the checkpoint is of a model with "
            f"{module.network.spec.topology.describe()}; name the trace it was trained on."
        )
    data.leave_out(module.seen)
    if module.sizes and sizes_of(data) != module.sizes:
        raise DataError(
            f"{data.trace_path} is another trace than the checkpoint was trained on (sequences and tokens by part: "
            f"{sizes_of(data)} here, {module.sizes} there); name the trace it was trained on."
        )
    return data
