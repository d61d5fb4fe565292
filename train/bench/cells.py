"""Cells of a table of trainings: one trace, one config, one length, one seed; stored, so that a stopped run goes on.

A cell is trained and evaluated by the program's own commands, each in a process of its own. Knows folders and JSON;
knows no predictor.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ...collect.errors import DataError
from ...collect.staging import staged_file
from ...configs import find_config

log = logging.getLogger(__name__)

BUNDLE, RUN, INPUTS, RESULT = "bundle", "run", "inputs.json", "cell.json"
PARTS = ("cell", "inputs", "machine", "train", "evaluation")
BLOCK = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Cell:
    """Name one training and its evaluation."""

    label: str
    """The trace in words, as it stands in tables and folder names."""
    trace: Path
    """Trace that is trained on."""
    config: str
    """Name of a packaged config."""
    minutes: float
    """Longest training."""
    seed: int
    """Seed of weights and dropout; the split's own stays 0."""
    tested: Path | None = None
    """Trace that is evaluated, where that is not the held-out part of the one that is trained on."""
    split_by: str = "group"
    """What stays together when sequences are held out."""

    @property
    def name(self) -> str:
        """Folder of the cell."""
        split = "" if self.split_by == "group" else f".by-{self.split_by}"
        tested = "" if self.tested is None else f".on-{self.tested.name}"
        return f"{self.label}.{self.config}.{self.minutes:g}min.seed{self.seed}{split}{tested}"


def run_cell(cell: Cell, folder: Path, machine: dict[str, Any]) -> dict[str, Any]:
    """Give a cell's result: the stored one, or train (or go on training) and evaluate.

    Args:
        folder: where cells are kept, each in a folder of its own.
        machine: what the result says of where it was made.

    Returns:
        {"cell", "inputs", "machine", "train", "evaluation"}, the last two as the two commands print them

    Raises:
        DataError: if a command fails, or the stored cell is of another trace or config.
    """
    own = folder / cell.name
    inputs = _inputs(cell)
    stored = read_cell(own)
    if stored is not None:
        _require(own, stored["inputs"], inputs)
        log.info("%s: stored", cell.name)
        return stored
    own.mkdir(parents=True, exist_ok=True)
    begun = own / INPUTS
    if begun.is_file():
        _require(own, _read(begun, own), inputs)
    else:
        _write(begun, inputs)
    trained = own / "train.json"
    if not trained.is_file():
        if (own / BUNDLE).exists():  # exported, but what the command said is lost: it is exported once more
            shutil.rmtree(own / BUNDLE)
        log.info("%s: training", cell.name)
        _write(trained, _foregate(_training(cell, own)))
    log.info("%s: evaluating", cell.name)
    evaluation = _foregate(["evaluate", str(own / BUNDLE), str(cell.tested or cell.trace)])
    result = {
        "cell": {**asdict(cell), "trace": cell.trace.name, "tested": cell.tested and cell.tested.name},
        "inputs": inputs,
        "machine": machine,
        "train": _read(trained, own),
        "evaluation": evaluation,
    }
    for part in ("train", "evaluation"):
        for key in ("bundle", "trace"):  # where it lay on this machine
            result[part].pop(key, None)
    _write(own / RESULT, result)
    return result


def read_cell(folder: Path) -> dict[str, Any] | None:
    """Read a stored cell, None where there is none.

    Raises:
        DataError: if it is damaged.
    """
    path = folder / RESULT
    return _read(path, folder, *PARTS) if path.is_file() else None


def _read(path: Path, cell: Path, *parts: str) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(value, dict) or not set(parts) <= set(value):
            raise ValueError(f"it lacks {', '.join(parts)}" if parts else "no object")
    except ValueError as error:
        raise DataError(f"{path} is damaged ({error}); remove {cell} to train that cell again.") from error
    return value


def _require(own: Path, stored: Any, inputs: dict[str, Any]) -> None:
    if stored != inputs:
        raise DataError(
            f"{own} was made from another trace or config; remove the folder to train it again, or name another one by "
            "--cells."
        )


def _training(cell: Cell, own: Path) -> list[str]:
    """Give the words of the training command, which goes on where an earlier one stopped."""
    resume = ["--resume", "true"] if (own / RUN / "last.ckpt").is_file() and not (own / BUNDLE).exists() else []
    return [
        "train",
        *("--config", cell.config, "--trace", str(cell.trace), "--out", str(own / BUNDLE)),
        *("--run-dir", str(own / RUN), "--max-minutes", str(cell.minutes), "--fit.seed", str(cell.seed)),
        *("--data.split.by", cell.split_by, "--tracker", "csv"),
        *resume,
    ]


def _foregate(words: list[str]) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "foregate.cli", *words, "--json"], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise DataError(f"foregate {' '.join(words)} failed: {done.stderr.strip()[-400:]}")
    return json.loads(done.stdout)


def _inputs(cell: Cell) -> dict[str, Any]:
    """Say what a result depends on, by content."""
    tested = {} if cell.tested is None else {"tested": _digest(cell.tested)}
    return {"trace": _digest(cell.trace), "config": _digest(find_config("train", cell.config)), **tested}


def _digest(path: Path) -> str:
    """Hash a trace: its file, or the files of its folder."""
    digest = hashlib.sha256()
    for file in [path] if path.is_file() else sorted(path.glob("*.*")):
        with file.open("rb") as opened:
            while block := opened.read(BLOCK):
                digest.update(block)
    return digest.hexdigest()


def _write(path: Path, value: dict[str, Any]) -> None:
    with staged_file(path) as file:
        file.write((json.dumps(value, indent=1) + "\n").encode())
