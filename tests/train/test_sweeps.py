"""Every sweep is one that W&B takes, and whatever it may draw is legal for `foregate train`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from foregate.cli.train import parser

FOLDER = Path(__file__).resolve().parents[2] / "configs" / "sweeps"
FILES = sorted(FOLDER.glob("*.yaml"))


def drawn(parameter: dict[str, Any]) -> list[Any]:
    """Give the values that a parameter may take, of a range its ends."""
    return parameter["values"] if "values" in parameter else [parameter["min"], parameter["max"]]


def config_of(sweep: dict[str, Any]) -> str:
    """Give the packaged config that the sweep starts from."""
    (script,) = [word for word in sweep["command"] if "--config" in word]
    return script.split("--config ")[1].split()[0]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_value_is_legal(path: Path) -> None:
    sweep = yaml.safe_load(path.read_text(encoding="utf-8"))
    words = ["--trace", "x", "--out", "y", "--config", config_of(sweep)]
    made = parser()
    made.exit_on_error = False
    for name, parameter in sweep["parameters"].items():
        for value in drawn(parameter):
            args = made.parse_args([*words, f"--{name}={value}"])  # as the agent writes it
            assert args[name] == value
            built = made.instantiate(args)
            holder = {"model": built.model, "data": built.data, "fit": built.fit}[name.partition(".")[0]]
            last = name.rpartition(".")[2]
            found = [getattr(part, last, None) for part in (holder, getattr(holder, "network_settings", None))]
            assert value in [*found, getattr(holder, "rates", {}).get(last)]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_it_has_what_wandb_asks_for(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    sweep = yaml.safe_load(text)
    assert text.startswith("# ")
    assert sweep["method"] in ("grid", "random", "bayes")
    assert sweep["metric"] == {"name": "validation_recall", "goal": "maximize"}
    for name, parameter in sweep["parameters"].items():
        ranged = {"distribution", "min", "max"} == set(parameter) and parameter["min"] < parameter["max"]
        assert ranged or {"values"} == set(parameter), name


@pytest.mark.skipif(sys.platform == "win32", reason="a POSIX shell")
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_command_reaches_foregate_with_its_values(path: Path, tmp_path: Path) -> None:
    sweep = yaml.safe_load(path.read_text(encoding="utf-8"))
    stub = tmp_path / "foregate"
    stub.write_text('#!/bin/sh\necho "$WANDB_MODE"\nfor word in "$@"; do echo "$word"; done\n')
    stub.chmod(0o755)
    values = [f"--{name}={drawn(parameter)[0]}" for name, parameter in sweep["parameters"].items()]
    command = [
        part for word in sweep["command"] for part in {"${env}": ["/usr/bin/env"], "${args}": values}.get(word, [word])
    ]
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "TRACE": "my trace", "WANDB_RUN_ID": "r1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    mode, *words = done.stdout.splitlines()
    assert mode == "online"
    assert words == ["train", "--config", config_of(sweep), "--trace", "my trace", "--out", "sweep/r1", *values]
