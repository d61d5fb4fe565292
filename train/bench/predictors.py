"""What every family is worth on real routing: train each on each trace, evaluate it, and write the page of results.

Cells are stored one by one; a run that is stopped goes on where it was. Knows traces and configs by name; what a family
is, only its config knows.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...collect.errors import DataError, SettingError
from ...collect.smoke import smoke
from ...collect.staging import staged_file
from ...collect.trace import Trace
from ...configs import config_names
from ..split import By
from .cells import Cell, read_cell, run_cell
from .results_page import results_page

TRACES = {
    "mixtral": "mixtral-8x7b-instruct_mtbench.npz",
    "gpt-oss": "gpt-oss-20b_mixed.npz",
    "deepseek": "deepseek-v2-lite-chat_puffin.npz",
}
CAUSAL = ("copy_attention", "copy_layers", "sru_attention", "lstm_sparsemax", "mlp", "routing_path", "eam")
SMOKE_MINUTES = 0.05


@dataclass(frozen=True, kw_only=True)
class PredictorsBench:
    """Train every family on every trace and say what each is worth, beside what is free."""

    traces: str = ",".join(TRACES)
    """Traces, with commas: names of those under FOREGATE_SHARED (../shared by default), or paths; TRAINED+TESTED to
    evaluate on another one than the held-out part."""
    families: str = ",".join(CAUSAL)
    """Packaged configs of foregate train, with commas."""
    minutes: float = 8.0
    """Longest training of a cell."""
    seed: int = 0
    """Seed of weights and dropout."""
    split_by: By = "group"
    """What stays together when sequences are held out: a group, as a conversation, or a whole category of text."""
    cells: str = "runs/predictors"
    """Folder where results are kept; cells that are there already are not trained again."""
    page: str | None = None
    """Markdown page to write from all cells of the folder, as docs/results.md."""
    stored_only: bool = False
    """Train nothing: write the page from what is there."""

    def __post_init__(self) -> None:
        if not 0 < self.minutes < math.inf:
            raise SettingError(f"minutes must be positive, got {self.minutes}.")
        for name in self.named(self.families):
            if name not in config_names("train"):
                raise SettingError(f"families must be configs of {', '.join(config_names('train'))}, got {name!r}.")
        if self.page is not None and not Path(self.page).parent.is_dir():
            raise SettingError(f"page must lie in a folder that is there, got {self.page}.")

    @staticmethod
    def named(words: str) -> list[str]:
        """Split words at commas."""
        return [word.strip() for word in words.split(",") if word.strip()]


def bench(settings: PredictorsBench, machine: dict[str, Any]) -> dict[str, Any]:
    """Train and evaluate what is not stored, and give all cells of the folder.

    Returns:
        {"arms": {CELL: {"trace", "family", "recall", "interval", "best_free", "recovered_share", ...}}, "machine",
        "page"}

    Raises:
        DataError: if a trace is not there, or a command fails.
    """
    folder = Path(settings.cells)
    for cell in [] if settings.stored_only else _cells(settings):
        run_cell(cell, folder, machine)
    results = [found for own in sorted(folder.glob("*/")) if (found := read_cell(own)) is not None]
    if not results:
        raise DataError(f"{folder} holds no results; run foregate bench predictors without --stored-only first.")
    if settings.page is not None:
        with staged_file(Path(settings.page)) as file:
            file.write(results_page(results).encode())
    return {"arms": {_name(found): _arm(found) for found in results}, "machine": machine, "page": settings.page}


def describe(result: dict[str, Any]) -> str:
    """Say what each cell reached, one line each."""
    lines = []
    for name, arm in result["arms"].items():
        share = arm["recovered_share"]
        recovered = "" if share is None else f", recovers {share:.3f} of the gap"
        parts = [f"{horizon} {value:.3f} (free {arm['free'][horizon]:.3f})" for horizon, value in arm["recall"].items()]
        lines.append(f"{name}: recall {', '.join(parts)}{recovered}, {arm['latency_ms']['p50']:.2f} ms a step")
    return "\n".join(lines)


def _cells(settings: PredictorsBench) -> list[Cell]:
    shared = Path(os.environ.get("FOREGATE_SHARED", "../shared")) / "traces"
    cells = []
    for pair in settings.named(settings.traces):
        if not all(pair.split("+")) or pair.count("+") > 1:
            raise SettingError(f"traces must be TRAINED or TRAINED+TESTED, got {pair!r}.")
        paths = [shared / TRACES[name] if name in TRACES else Path(name) for name in pair.split("+")]
        absent = [path for path in paths if not path.exists()]
        if absent:
            raise DataError(
                f"There is no trace {absent[0]}; name one, or set FOREGATE_SHARED to the folder that has traces/."
            )
        _check_pair(paths)
        cells += [
            Cell(
                label=pair if pair in TRACES else paths[0].stem,
                trace=paths[0],
                tested=paths[1] if len(paths) == 2 else None,
                config=config,
                minutes=smoke(settings.minutes, SMOKE_MINUTES),
                seed=settings.seed,
                split_by=settings.split_by,
            )
            for config in settings.named(settings.families)
        ]
    names = [cell.name for cell in cells]
    for name in names:
        if names.count(name) > 1:
            raise SettingError(f"traces and families must differ by name, got {name} twice; give them one by one.")
    return cells


def _check_pair(paths: list[Path]) -> None:
    """Refuse, before hours of training, a trace to test on that is none, or of another model.

    Raises:
        TraceError, DataError: in that case.
    """
    if len(paths) == 2:
        trained, tested = (Trace.open(path).topology for path in paths)
        if not trained.same_routing(tested):
            raise DataError(f"{paths[1]} has {tested.describe()}, and {paths[0]} {trained.describe()}; name another.")


def _name(result: dict[str, Any]) -> str:
    cell = result["cell"]
    split = "" if cell.get("split_by", "group") == "group" else f".by-{cell['split_by']}"
    tested = f".on-{cell['tested']}" if cell.get("tested") else ""
    return f"{cell['label']}.{cell['config']}.{cell['minutes']:g}min.seed{cell['seed']}{split}{tested}"


def _arm(result: dict[str, Any]) -> dict[str, Any]:
    evaluation, train = result["evaluation"], result["train"]
    horizons = evaluation["horizons"]
    return {
        "trace": result["cell"]["label"],
        "family": evaluation["family"],
        "recall": {name: told["recall_at_k"] for name, told in horizons.items()},
        "interval": {name: told["interval"] for name, told in horizons.items()},
        "free": {name: max(told["baselines"].values(), default=0.0) for name, told in horizons.items()},
        "best_free": evaluation["best_free"],
        "beats_free": evaluation["beats_free"],
        "recovered_share": evaluation["recovered_share"],
        "latency_ms": evaluation["latency_ms"],
        "train_s": train.get("train_s"),
        "steps": train.get("steps"),
    }
