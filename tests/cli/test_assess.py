"""`foregate assess` from outside: JSON, the page, and wrong usage in one sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from foregate.cli.main import main


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    table = np.stack([[rng.permutation(8)[:2] for _ in range(3)] for _ in range(12)]).astype(np.uint8)
    ids = rng.integers(12, size=240).astype(np.int32)
    path = tmp_path / "trace.npz"
    np.savez(path, experts=table[ids], offsets=np.arange(0, 241, 20), token_ids=ids)
    return path


def test_json_is_one_value_with_the_keys_of_the_documentation(trace: Path, capsys: Any) -> None:
    assert main(["assess", str(trace), "--json", "--sequences", "10"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert {"verdict", "gains", "curves", "signals", "overlap", "coverage", "load", "contamination"} <= set(values)
    assert {"training", "sentence", "because", "kind"} <= set(values["verdict"])
    assert values["counted"]["sequences"] == values["replayed"]["sequences"] == 10
    assert "report" not in values


def test_the_terminal_gets_the_verdict_first(trace: Path, capsys: Any, tmp_path: Path) -> None:
    words = ["assess", str(trace), "--hardware", "pcie4", "--expert-mib", "10", "--dense-ms", "1"]
    assert main([*words, "--out", str(tmp_path / "new" / "folder")]) == 0
    out = capsys.readouterr().out
    assert out.startswith("With 6 of 24 experts (25%) in slots on pcie4, LRU on demand makes")
    page = tmp_path / "new" / "folder" / "assessment.html"
    assert out.splitlines()[-1] == f"Report: {page}"
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert main([*words, "--out", str(tmp_path / "page.html"), "--as", "prefill", "--capacity", "12"]) == 0
    assert (tmp_path / "page.html").is_file()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--as", "backwards"], "backwards"),
        (["--capacity", "25"], "capacity"),
        (["--capacity", "0x10"], "capacity must be a number of experts or a share such as 0.25 or 25%, got '0x10'"),
        (["--capacity", "0.25,0.5"], "capacity must be one"),
        (["--seed", "-1"], "seed must be at least 0, got -1"),
        (["--sequences", "0"], "sequences must be at least 1"),
        (["--hardware", "rtx3091"], "rtx3090"),
        (["--expert-mib", "-1", "--hardware", "pcie4"], "expert-mib"),
        (["--out", "missing/page.html"], "missing"),
    ],
)
def test_wrong_usage_is_one_sentence(trace: Path, capsys: Any, words: list[str], told: str) -> None:
    assert main(["assess", str(trace), *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert told in err.splitlines()[-1]
    assert "Traceback" not in err


def test_a_page_is_written_only_where_nothing_stands(trace: Path, capsys: Any, tmp_path: Path) -> None:
    mine = tmp_path / "page.html"
    mine.write_text("mine", encoding="utf-8")
    (tmp_path / "folder").mkdir()
    for out in (mine, tmp_path / "folder"):
        code = main(["assess", str(trace), "--out", str(out), "--sequences", "2"])
        assert code == (2 if out == mine else 0)
    assert f"{mine} exists already; give --out another name or remove it." in capsys.readouterr().err
    before = (tmp_path / "folder" / "assessment.html").read_bytes()
    assert main(["assess", str(trace), "--out", str(tmp_path / "folder")]) == 2
    assert "assessment.html exists already" in capsys.readouterr().err
    assert (tmp_path / "folder" / "assessment.html").read_bytes() == before
    assert mine.read_text(encoding="utf-8") == "mine"


def test_no_trace_is_a_failure_and_writes_nothing(tmp_path: Path, capsys: Any) -> None:
    assert main(["assess", str(tmp_path / "none"), "--out", str(tmp_path / "page.html")]) == 1
    assert "no routing trace" in capsys.readouterr().err
    assert not (tmp_path / "page.html").exists()


@pytest.mark.parametrize(
    ("capacity", "slots"), [("1.0", 24), ("100%", 24), ("1", 1), ("25%", 6), ("0.25", 6), ("7", 7)]
)
def test_a_capacity_means_what_it_means_to_simulate(trace: Path, capsys: Any, capacity: str, slots: int) -> None:
    assert main(["assess", str(trace), "--json", "--capacity", capacity]) == 0
    assert json.loads(capsys.readouterr().out)["capacity"] == slots
    assert main(["simulate", str(trace), "--json", "--policies", "lru", "--capacity", capacity]) == 0
    assert json.loads(capsys.readouterr().out)["capacity"] == slots
