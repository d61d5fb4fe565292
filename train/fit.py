"""Training a predictor and exporting it: the one place that wires data, module, trainer and tracking together."""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import Logger

from ..collect.errors import SettingError
from ..collect.lock import WriterLock
from ..predictors.bundle import Bundle, check_target
from ..predictors.network import NetworkSettings
from .data import TraceData
from .export import export
from .fit_settings import FitSettings
from .module import NotANumber, PredictorModule
from .split import SplitSettings
from .starting_point import start_anew, start_from_bundle, start_where_it_stopped
from .tracking import log_results
from .trainer import LAST, RECALL, interruptible, leads, make_trainer, quiet

__all__ = ["FitSettings", "fit", "train"]

log = logging.getLogger(__name__)


def train(
    trace: str | Path,
    out: str | Path,
    *,
    max_minutes: float = 10.0,
    max_steps: int = -1,
    seed: int = 0,
    logger: Logger | None = None,
    network: NetworkSettings | None = None,
    split: SplitSettings | None = None,
    progress: bool = False,
) -> dict[str, Any]:
    """Train a predictor on a trace with the default settings and export it.

    Returns:
        as `fit`.

    Raises:
        TraceError, DataError: if the trace cannot be read or has too few sequences.
    """
    data = TraceData(trace, split=split)
    module = PredictorModule(network)
    settings = FitSettings(max_minutes=max_minutes, max_steps=max_steps, seed=seed)
    return fit(data, module, out, settings, logger=logger, progress=progress)


def fit(
    data: TraceData,
    module: PredictorModule,
    out: str | Path,
    settings: FitSettings | None = None,
    *,
    run_dir: Path | None = None,
    resume: bool = False,
    init: Bundle | None = None,
    logger: Logger | Callable[[], Logger | None] | None = None,
    progress: bool = False,
) -> dict[str, Any]:
    """Train a module, keep its best weights by validation recall, and export them to a bundle.

    Under torchrun every process calls it with the same arguments; the first rank alone exports, the others get {}.

    Args:
        data: the trace.
        module: family and rates; its network is built here.
        out: folder of the bundle.
        settings: limits and seeds.
        run_dir: where checkpoints stay; a temporary folder where not given.
        resume: go on from the last checkpoint of `run_dir`, to the weights of an uninterrupted run.
        init: bundle whose weights training starts from; the module's network must have its settings.
        logger: where metrics and artifacts go, or what opens that; it is opened when nothing is left to be refused.
        progress: show a progress bar on standard error.

    Returns:
        {"bundle", "family", "horizon", "metrics", "latency_ms", "steps", "train_s", "export_s"}

    Raises:
        TraceError, DataError: if the trace cannot be trained on, another run writes to `run_dir`, or the loss is no
            number.
        SettingError: if there is nothing to resume, or it was another run.
        BundleError: if `init` is of another model, or something stands at `out`.
    """
    settings, kept = settings or FitSettings(), run_dir
    check_target(Path(out))
    data.setup()
    with contextlib.ExitStack() as stack:
        if run_dir is None:
            run_dir = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="foregate-train-")))
        last = run_dir / LAST
        if resume and not last.is_file():
            raise SettingError(
                f"There is nothing to resume: {run_dir} has no {LAST}; leave --resume out to start anew."
            )
        stack.enter_context(quiet())
        stack.enter_context(torch.random.fork_rng())
        torch.manual_seed(settings.seed)
        module.seed = settings.seed
        start = time.monotonic()
        if resume:
            start_where_it_stopped(module, data, last)
        elif init is not None:
            start_from_bundle(module, data, init)
        else:
            start_anew(module, data)
        if kept:
            stack.enter_context(_alone(run_dir))  # a place that cannot be written to is noticed before training, too
        opened = logger() if callable(logger) else logger
        trainer, best = make_trainer(settings, run_dir, opened, progress)
        with interruptible(), _naming(last if kept else None):
            if any(True for _ in module.network.parameters()):  # else it has learned all it can
                trainer.fit(module, datamodule=data, ckpt_path=last if resume else None, weights_only=True)
            module = _best(trainer, module, data, best)
        trained = time.monotonic()
        run: dict[str, Any] = {
            "seed": settings.seed,
            "steps": trainer.global_step,
            "seconds": round(trained - start, 1),
        }
        if module.distillation is not None:
            run["distilled"] = data.has_scores  # False: the trace has no scores to learn from
        if init is not None:
            run["init"] = init.path.name
        if not leads():
            return {}
        module.cpu().float()
        bundle = export(module, data, out, run)
        exported = time.monotonic()
        log_results(opened, bundle.card, {"bundle": bundle.path, "checkpoint": last})
    return {
        "bundle": str(out),
        "family": bundle.spec.family,
        "horizon": bundle.spec.horizon,
        "metrics": bundle.card["metrics"],
        "latency_ms": bundle.card["latency_ms"],
        "steps": trainer.global_step,
        "train_s": round(trained - start, 2),
        "export_s": round(exported - trained, 2),
    }


def _best(trainer: L.Trainer, module: PredictorModule, data: TraceData, best: ModelCheckpoint) -> PredictorModule:
    """Give the weights with the best validation recall: the last ones, or those of the best checkpoint."""
    final = trainer.validate(module, datamodule=data, verbose=False)[0][RECALL]
    kept = best.best_model_score
    log.info("validation recall %.4f at the end, best before it %s", final, "none" if kept is None else f"{kept:.4f}")
    trainer.save_checkpoint(Path(best.dirpath or "") / LAST)
    if kept is None or final >= float(kept):
        return module
    return PredictorModule.load(best.best_model_path)


@contextlib.contextmanager
def _alone(run_dir: Path) -> Iterator[None]:
    """Keep other runs out of a run's folder: they would take each other's checkpoints for their own."""
    run_dir.mkdir(parents=True, exist_ok=True)
    lock = WriterLock(run_dir, int(os.environ.get("RANK", "0")))  # torchrun's ranks share the folder
    try:
        yield
    finally:
        lock.release()
        with contextlib.suppress(OSError):
            run_dir.rmdir()  # where nothing was written, nothing is left


@contextlib.contextmanager
def _naming(last: Path | None) -> Iterator[None]:
    """Say where the last good checkpoint is when the loss is no number any more."""
    try:
        yield
    except NotANumber as error:
        if last is None or not last.is_file():
            raise
        text = str(error).rstrip(".")
        raise NotANumber(f"{text}; {last} is from before it, --resume goes on from there.") from error
