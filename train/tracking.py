"""Where a run is written down: Weights & Biases (offline unless asked), CSV, or nowhere. Knows loggers, no models."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal, get_args

from lightning.pytorch.loggers import CSVLogger, Logger, WandbLogger

from ..collect.errors import SettingError

Tracker = Literal["wandb", "csv", "none"]
MODES = ("offline", "online", "disabled", "shared")
RUN_ID = "wandb_run_id"  # file in the run folder


def open_logger(
    tracker: Tracker, folder: Path, name: str, project: str = "foregate", *, resume: bool = False
) -> Logger | None:
    """Open a run's logger under a folder. W&B runs offline unless WANDB_MODE says otherwise.

    A resumed run is written down as a further piece of the one that the folder holds: online it grows, and of an
    offline one `wandb sync --append` joins the pieces.

    Raises:
        SettingError: if WANDB_MODE is none of W&B's modes, or W&B refuses to start.
    """
    if tracker not in get_args(Tracker):
        raise SettingError(f"tracker must be one of {', '.join(get_args(Tracker))}, got {tracker!r}.")
    if tracker == "none":
        return None
    folder.mkdir(parents=True, exist_ok=True)
    if tracker == "csv":
        return CSVLogger(folder, name="metrics")
    mode = os.environ.get("WANDB_MODE", "offline")
    if mode not in MODES:
        raise SettingError(f"WANDB_MODE must be one of {', '.join(MODES)}, got {mode!r}.")
    import wandb

    kept = folder / RUN_ID
    known = kept.read_text(encoding="utf-8").strip() if resume and kept.is_file() else None
    try:
        run = wandb.init(
            project=project,
            name=name,
            dir=folder,
            mode=mode,  # pyright: ignore[reportArgumentType]
            reinit="create_new",
            id=known,
            resume="allow" if known and mode != "offline" else None,  # offline there is nothing to look it up in
        )
    except wandb.Error as error:
        raise SettingError(
            f"Weights & Biases did not start ({error}); log in by wandb login, or set WANDB_MODE=offline."
        ) from error
    kept.write_text(f"{run.id}\n", encoding="utf-8")
    return WandbLogger(experiment=run, save_dir=folder)


def log_results(logger: Logger | None, card: dict[str, Any], files: dict[str, Path]) -> None:
    """Add a run's settings, metrics and artifacts (by kind: `bundle`, `checkpoint`), and finish it."""
    if logger is None:
        return
    logger.log_hyperparams({"family": card["family"], "settings": card["settings"], "training": card["training"]})
    metrics = card["metrics"]
    logger.log_metrics(
        {"test_recall_at_k": metrics["recall_at_k"]}
        | {f"test_recall_{name}": value for name, value in metrics["baselines"].items()}
        | {"latency_ms_p50": card["latency_ms"]["p50"]}
    )
    if isinstance(logger, WandbLogger):
        import wandb

        run = logger.experiment
        for kind, path in files.items():
            artifact = wandb.Artifact(f"{card['family']}-{kind}", type=kind, metadata={"metrics": metrics})
            (artifact.add_dir if path.is_dir() else artifact.add_file)(str(path))
            run.log_artifact(artifact)
        run.finish()
    logger.finalize("success")
