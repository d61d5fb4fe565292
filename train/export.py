"""From a trained module to a bundle with its card: metrics beside the free baselines, split, data, checksums.

Knows modules, data and bundles; knows nothing of the training loop.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..collect.errors import DataError, TraceError
from ..predictors.base import Predictor
from ..predictors.bundle import Bundle, check_target
from ..predictors.bundle_writer import write_bundle
from .data import TraceData
from .module import PredictorModule
from .report import free_baselines, measured
from .split import SplitSettings


def export(module: PredictorModule, data: TraceData, out: str | Path, run: dict[str, Any] | None = None) -> Bundle:
    """Write the bundle of a trained module, measured on the data's test sequences.

    Raises:
        BundleError: if the exported graph differs from the network, or `out` is no place for a bundle.
    """
    check_target(Path(out))  # measuring takes a while
    spec = module.network.spec
    baselines = free_baselines(spec, data.fitting_rows, data.rows["test"])

    def describe(predictor: Predictor) -> dict[str, Any]:
        metrics = measured(predictor, data.rows["test"], baselines)
        return {"metrics": metrics, "calibration": metrics.pop("calibration")}

    header = data.header
    card = {
        "model": header.model,
        "model_fingerprint": header.model_fingerprint,
        "tokenizer_fingerprint": header.tokenizer_fingerprint,
        "training": {
            "trace": data.trace_path.name,
            "sources": sorted({(row.source or "").rpartition(":")[0] for row in data.fitting_rows} - {""})[:20],
            "split": asdict(data.split),
            "sequences": {part: len(rows) for part, rows in data.rows.items()},
            "tokens": {part: sum(row.num_tokens for row in rows) for part, rows in data.rows.items()},
            "rates": module.rates,
            **(run or {}),
        },
    }
    real, trained_on = data.rows["test"], data.fitting_rows
    return write_bundle(out, module.network, card=card, describe=describe, real=real, trained_on=trained_on)


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
    return data
