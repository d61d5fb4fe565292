"""Training a predictor and exporting it: the one place that wires data, module, trainer and tracking together."""

from __future__ import annotations

import contextlib
import logging
import signal
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint, RichProgressBar, Timer
from lightning.pytorch.loggers import Logger

from ..collect.errors import SettingError
from ..predictors.base import PredictorSpec
from ..predictors.bundle import check_target
from ..predictors.network import NetworkSettings, TokenNetwork
from ..predictors.reuse import horizon_of
from ..predictors.rows import statistics
from .data import TraceData
from .export import export
from .module import PredictorModule
from .split import SplitSettings
from .tracking import log_results

log = logging.getLogger(__name__)

RECALL = "validation_recall"
LAST = "last.ckpt"


@dataclass(frozen=True, kw_only=True)
class FitSettings:
    """How long and where a predictor is trained."""

    max_minutes: float = 10.0
    """Training time over all resumed parts; export follows."""
    max_steps: int = -1
    """Optimizer steps; -1 for no limit."""
    max_epochs: int = 60
    """Passes over the training sequences."""
    seed: int = 0
    """Seed of weights and dropout; the split has its own."""
    validate_steps: int = 50
    """Steps from one validation, and checkpoint, to the next."""
    patience: int = 12
    """Validations without a better recall after which training stops."""
    clip: float = 1.0
    """Largest norm of the gradient."""
    accelerator: str = "auto"
    """Lightning accelerator: auto, cpu, gpu or mps."""
    precision: str = "32-true"
    """Lightning precision."""

    def __post_init__(self) -> None:
        for name in ("max_minutes", "max_epochs", "validate_steps", "patience", "clip"):
            if getattr(self, name) <= 0:
                raise SettingError(f"{name} must be positive, got {getattr(self, name)}.")
        if self.max_steps != -1 and self.max_steps < 1:
            raise SettingError(f"max_steps must be -1 or at least 1, got {self.max_steps}.")


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
    logger: Logger | None = None,
    progress: bool = False,
) -> dict[str, Any]:
    """Train a module, keep its best weights by validation recall, and export them to a bundle.

    Args:
        data: the trace.
        module: family and rates; its network is built here.
        out: folder of the bundle.
        settings: limits and seeds.
        run_dir: where checkpoints stay; a temporary folder where not given.
        resume: go on from the last checkpoint of `run_dir`.
        logger: where metrics and artifacts go.
        progress: show a progress bar on standard error.

    Returns:
        {"bundle", "family", "horizon", "metrics", "latency_ms", "steps", "train_s", "export_s"}
    """
    settings = settings or FitSettings()
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
        stack.enter_context(_quiet())
        stack.enter_context(torch.random.fork_rng())
        torch.manual_seed(settings.seed)
        start = time.monotonic()
        _build(module, data)
        trainer, best = _trainer(settings, run_dir, logger, progress)
        run_dir.mkdir(parents=True, exist_ok=True)  # a place that cannot be written to is noticed before training
        with _interruptible():
            trainer.fit(module, datamodule=data, ckpt_path=last if resume else None, weights_only=True)
        module = _best(trainer, module, data, best)
        trained = time.monotonic()
        run = {"seed": settings.seed, "steps": trainer.global_step, "seconds": round(trained - start, 1)}
        if module.distillation is not None:
            run["distilled"] = data.has_scores  # False: the trace has no scores to learn from
        module.cpu()
        bundle = export(module, data, out, run)
        exported = time.monotonic()
        log_results(logger, bundle.card, {"bundle": bundle.path, "checkpoint": last})
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


def _build(module: PredictorModule, data: TraceData) -> None:
    """Make the network for the data, started from the statistics of the training sequences."""
    network = module.network_settings
    spec = PredictorSpec(
        family=network.family,
        horizon=network.horizon(data.stack),
        topology=data.header.topology,
        stack=data.stack,
        vocab_size=data.vocab_size,
    )
    found = statistics(data.rows["training"], spec.topology, spec.shape[1])
    module.build(spec, found.token_ids, found)
    if isinstance(module.network, TokenNetwork):
        data.after_tokens = horizon_of(module.network.discount)
    data.with_scores = module.distillation is not None
    if module.distillation is not None and not data.has_scores:
        log.warning(
            "%s has no router scores: %s trains by cross-entropy alone, without distillation; record the trace with "
            "--scores for both",
            data.trace_path,
            network.family,
        )
    module.data_settings = {
        "trace": str(data.trace_path.resolve()),
        "stack": data.stack,
        "split": asdict(data.split),
        "chunk_tokens": data.chunk_tokens,
        "context_tokens": data.context_tokens,
        "batch_tokens": data.batch_tokens,
    }


def _trainer(
    settings: FitSettings, run_dir: Path, logger: Logger | None, progress: bool
) -> tuple[L.Trainer, ModelCheckpoint]:
    best = ModelCheckpoint(
        run_dir,
        filename="best",
        monitor=RECALL,
        mode="max",
        save_last=True,
        save_on_train_epoch_end=False,
        enable_version_counter=False,
    )
    callbacks: list[Callback] = [
        best,
        Timer(duration=timedelta(minutes=settings.max_minutes), verbose=False),
        EarlyStopping(RECALL, mode="max", patience=settings.patience),
    ]
    if progress:
        callbacks.append(RichProgressBar(console_kwargs={"stderr": True}))
    try:
        trainer = _lightning(settings, callbacks, logger, progress)
    except (MisconfigurationException, ValueError) as error:
        raise SettingError(
            f"Lightning cannot train with accelerator {settings.accelerator} and precision {settings.precision} "
            f"({error}); give others, as cpu and 32-true."
        ) from error
    return trainer, best


def _lightning(settings: FitSettings, callbacks: list[Callback], logger: Logger | None, progress: bool) -> L.Trainer:
    return L.Trainer(
        accelerator=settings.accelerator,
        devices=1,
        precision=settings.precision,  # pyright: ignore[reportArgumentType]
        max_steps=settings.max_steps,
        max_epochs=settings.max_epochs,
        check_val_every_n_epoch=None,
        val_check_interval=settings.validate_steps,
        num_sanity_val_steps=0,
        gradient_clip_val=settings.clip,
        logger=logger or False,
        log_every_n_steps=10,
        callbacks=callbacks,
        enable_progress_bar=progress,
        enable_model_summary=False,
        use_distributed_sampler=False,  # the batch sampler is ours
    )


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
def _interruptible() -> Iterator[None]:
    """Let Ctrl-C arrive as KeyboardInterrupt, as everywhere; Lightning makes an exit of it, and ignores the next."""
    handler = signal.getsignal(signal.SIGINT)
    try:
        yield
    except SystemExit as error:
        if not isinstance(error.__context__, KeyboardInterrupt):
            raise
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, handler)
        raise error.__context__ from None


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence Lightning's advertisements and its advice to start workers, which a small trace does not need."""
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.WARNING)
    try:
        with warnings.catch_warnings():
            for text in (
                ".*does not have many workers",
                ".*number of training batches .* is smaller than the logging interval",
                ".*Checkpoint directory .* exists and is not empty",
                ".*treespec, LeafSpec.* is deprecated",
            ):
                warnings.filterwarnings("ignore", message=text)
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
