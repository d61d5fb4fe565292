"""The Lightning trainer as foregate uses it: callbacks, ranks, and what it must not do to a terminal or a signal.

One process trains on one device. Started by torchrun, each of its processes is a rank: gradients are averaged, the
first rank alone writes. Knows settings and Lightning; knows no networks and no data.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import warnings
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint, RichProgressBar, Timer
from lightning.pytorch.loggers import Logger
from lightning.pytorch.strategies import DDPStrategy

from ..collect.errors import SettingError
from .fit_settings import FitSettings

RECALL = "validation_recall"
LAST = "last.ckpt"


def world() -> int:
    """Give the number of processes that train together: more than one only under torchrun."""
    return int(os.environ.get("WORLD_SIZE", "1")) if torch.distributed.is_torchelastic_launched() else 1


def leads() -> bool:
    """Say whether this process writes and prints: the only one, or the first rank."""
    return world() == 1 or os.environ.get("RANK") == "0"


def make_trainer(
    settings: FitSettings, run_dir: Path, logger: Logger | None, progress: bool
) -> tuple[L.Trainer, ModelCheckpoint]:
    """Make the trainer, and the callback that keeps the last and the best checkpoint in `run_dir`.

    Raises:
        SettingError: if Lightning cannot train so on this machine.
    """
    same: dict[str, Any] = {"save_on_train_epoch_end": False, "enable_version_counter": False}
    best = ModelCheckpoint(run_dir, filename="best", monitor=RECALL, mode="max", **same)
    callbacks: list[Callback] = [
        best,
        ModelCheckpoint(run_dir, filename=Path(LAST).stem, **same),  # after every validation, better or not
        Timer(duration=timedelta(minutes=settings.max_minutes), verbose=False),
        EarlyStopping(RECALL, mode="max", patience=settings.patience),
    ]
    if progress and leads():
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
    ranks = world()
    return L.Trainer(
        accelerator=settings.accelerator,
        devices=1 if ranks == 1 else int(os.environ["LOCAL_WORLD_SIZE"]),
        num_nodes=1 if ranks == 1 else ranks // int(os.environ["LOCAL_WORLD_SIZE"]),
        strategy="auto" if ranks == 1 else _shared(),
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
        enable_progress_bar=progress and leads(),
        enable_model_summary=False,
        use_distributed_sampler=False,  # the batch sampler is ours
    )


def _shared() -> DDPStrategy:
    """Average gradients; buffers are the same anyway, and ranks may have different numbers of validation batches."""
    return DDPStrategy(broadcast_buffers=False, find_unused_parameters=True)


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
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
def quiet() -> Iterator[None]:
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
                ".*find_unused_parameters=True was specified",
            ):
                warnings.filterwarnings("ignore", message=text)
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
