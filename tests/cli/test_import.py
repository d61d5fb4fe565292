"""`foregate import` from outside: what it prints, its exit codes, and that nothing is left behind."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from foregate.cli.main import main

IDS = np.random.default_rng(0).permuted(np.tile(np.arange(6), (40, 2, 1)), axis=2)[:, :, :2]


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Write a log of a warm-up and one forward of two layers."""
    rows = [{"type": "meta", "model_id": "some/model", "layers_logged": [0, 1], "top_k": 2}]
    for ids in (np.tile(IDS[:1], (32, 1, 1)), IDS):
        for layer in range(2):
            for token, chosen in enumerate(ids[:, layer].tolist()):
                rows.append({"type": "route", "token_idx": token, "layer": layer, "topk_ids": chosen})
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_the_value_and_a_valid_trace(log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "trace"
    assert main(["import", str(log), "--out", str(out), "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert {key: value[key] for key in ("sequences", "tokens", "rows_read", "rows_kept", "rows_dropped", "format")} == {
        "sequences": 1,
        "tokens": 40,
        "rows_read": 144,
        "rows_kept": 80,
        "rows_dropped": {"warm_up": 64},
        "format": "vllm-jsonl",
    }
    assert [layer["num_experts"] for layer in value["topology"]["layers"]] == [6, 6]
    assert {note["kind"] for note in value["notes"]} == {"remark", "tokens_apart"}
    assert json.loads((out / "trace.json").read_text(encoding="utf-8"))["notes"] == value["notes"]
    assert main(["validate", str(out)]) == 0


def test_the_report_is_one_screen_of_words(log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["import", str(log), "--out", str(tmp_path / "trace"), "--experts", "8", "--model", "m"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    lines = out.splitlines()
    assert lines[0].endswith("trace from vllm-jsonl, 2 causal layers x 8 experts, top-2, 1 sequence, 40 tokens")
    assert lines[1:3] == ["rows read 144, kept 80", "dropped 64: warm_up"]
    assert all(line.startswith("note: ") for line in lines[3:])
    assert len(lines) <= 24


def test_failures_are_one_sentence_and_leave_nothing(
    log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sprung = tmp_path / "sprung"

    class Trap:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(sprung),)

    torch.save({"records": [Trap()]}, tmp_path / "evil.pt")
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "file").write_text("mine", encoding="utf-8")
    before = sorted(path.name for path in tmp_path.rglob("*"))
    for words, code, text in (
        ([str(log), "--out", "there"], 2, "exists already"),
        ([str(log), "--out", "new", "--experts", "3"], 1, "are these physical ids"),
        ([str(log), "--out", "new", "--format", "nonesuch"], 2, "format must be one of"),
        ([str(log), "--out", "new", "--blocks", "[3,2]"], 2, "blocks must be rising numbers"),
        ([str(log), "--out", "new", "--experts", "0"], 2, "experts must be at least 1"),
        (["evil.pt", "--out", "new"], 1, "nothing was executed"),
        (["nowhere", "--out", "new"], 1, "does not exist"),
    ):
        here = Path.cwd()
        os.chdir(tmp_path)
        try:
            assert main(["import", *words]) == code
        finally:
            os.chdir(here)
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1), err
        assert err.startswith("foregate import: ")
        assert text in err
        assert ".partial-" not in err
    assert sorted(path.name for path in tmp_path.rglob("*")) == before
    assert not sprung.exists()


def test_blocks_may_be_given(log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["import", str(log), "--out", str(tmp_path / "trace"), "--blocks", "[1,3]", "--json"]) == 0
    layers = json.loads(capsys.readouterr().out)["topology"]["layers"]
    assert [layer["block"] for layer in layers] == [1, 3]
