"""Load tables: balance only, and said so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from foregate.cli.main import main
from foregate.collect.load_table import LoadHeader, LoadLayer, LoadRow, LoadTable, write_load_table
from foregate.runtime.assessment.load_table import assess_load


@pytest.fixture
def table(tmp_path: Path) -> Path:
    layers = (
        LoadLayer(stack="encoder", block=1, num_experts=2, top_k=1),
        LoadLayer(stack="decoder", block=1, num_experts=4, top_k=1),
    )
    counts = [(0, 0, [3, 1]), (0, 1, [1, 3]), (1, 0, [4, 0, 0, 0]), (1, 1, [0, 0, 0, 0])]
    rows = [
        LoadRow(run="one", stack=layers[layer].stack, layer=layer, batch=batch, counts=np.array(each, np.int64))
        for layer, batch, each in counts
    ]
    folder = tmp_path / "table"
    folder.mkdir()
    write_load_table(folder, LoadHeader(runs={"one": layers}, model="tiny"), rows)
    return folder


def test_balance_overall_and_in_a_batch(table: Path) -> None:
    values = assess_load(LoadTable.open(table))
    assert json.loads(json.dumps(values, allow_nan=False)) == values
    first, second = values["runs"]["one"]["layers"]
    assert values["runs"]["one"]["counts"] == [[4, 4], [4, 0, 0, 0]]
    assert (first["max_over_mean"], first["batch_max_over_mean"], first["batches"]) == (1.0, 1.5, 2)
    assert (second["max_over_mean"], second["batch_max_over_mean"], second["batches"]) == (4.0, 4.0, 1)
    assert values["runs"]["one"]["never_used"] == 0.5
    assert values["verdict"]["training"] is None


def test_the_command_takes_a_load_table(table: Path, tmp_path: Path, capsys: Any) -> None:
    assert main(["assess", str(table), "--json", "--out", str(tmp_path / "page.html")]) == 0
    assert json.loads(capsys.readouterr().out)["verdict"]["kind"] == "load_only"
    assert "counts without tokens" in (tmp_path / "page.html").read_text(encoding="utf-8")
    assert main(["assess", str(table)]) == 0
    assert capsys.readouterr().out.startswith("This is a load table")


@pytest.mark.parametrize("option", ["--hardware=h200", "--sequences=3", "--as=prefill", "--capacity=3", "--dense-ms=1"])
def test_options_that_say_nothing_about_counts_are_refused(option: str, table: Path, capsys: Any) -> None:
    assert main(["assess", str(table), option]) == 2
    sentence = f"is a load table, which holds no tokens to replay; leave out {option.partition('=')[0]}."
    assert sentence in capsys.readouterr().err.splitlines()[-1]
