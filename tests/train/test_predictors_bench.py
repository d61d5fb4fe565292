"""Cells of trainings: stored once, gone on with when stopped, refused when of something else; and their page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from foregate.collect.errors import DataError, SettingError, TraceError
from foregate.train.bench import cells, predictors
from foregate.train.bench.predictors import PredictorsBench, bench, describe
from foregate.train.bench.results_page import results_page

MACHINE = {
    "cpu": "made-up",
    "usable_cores": 2,
    "memory_gib": 4.0,
    "python": "3.11",
    "torch": "2.13",
    "accelerator": None,
}


def figures(recall: float) -> dict[str, Any]:
    return {"recall_at_k": recall, "interval": [recall - 0.01, recall + 0.01]}


def evaluation(recall: float) -> dict[str, Any]:
    told = {
        **figures(recall),
        "baselines": {"token_table": 0.5},
        "free": {"token_table": figures(0.5)},
        "gain": recall - 0.5,
        "gain_interval": [recall - 0.51, recall - 0.49],
    }
    return {
        "family": "made_up",
        "horizons": {"token": told},
        "best_free": "token_table",
        "beats_free": True,
        "recovered_share": 0.4,
        "latency_ms": {"p50": 0.5, "p99": 0.9},
        "bundle": "/some/where",
        "trace": "/some/where",
    }


class Program:
    """Stands for the program: notes its words, and makes what the training command leaves."""

    def __init__(self) -> None:
        self.calls: list[list[str]] = []
        self.fail = ""

    def __call__(self, words: list[str]) -> dict[str, Any]:
        self.calls.append(words)
        if words[0] == self.fail:
            raise DataError(f"foregate {words[0]} failed: made to")
        if words[0] == "train":
            Path(words[words.index("--out") + 1]).mkdir()
            return {"bundle": "/some/where", "steps": 7, "train_s": 1.5}
        return evaluation(0.6)


@pytest.fixture
def program(monkeypatch) -> Program:
    made = Program()
    monkeypatch.setattr(cells, "_foregate", made)
    return made


@pytest.fixture
def trace(tmp_path) -> Path:
    path = tmp_path / "small.npz"
    path.write_bytes(b"a trace")
    return path


def settings(tmp_path: Path, trace: Path, **others: Any) -> PredictorsBench:
    given: dict[str, Any] = {"families": "sru_attention", "minutes": 2.0, "cells": str(tmp_path / "cells")}
    return PredictorsBench(**({"traces": str(trace)} | given | others))


def test_a_cell_is_trained_once(program, tmp_path, trace, monkeypatch):
    monkeypatch.delenv("FOREGATE_SMOKE", raising=False)
    page = tmp_path / "results.md"
    first = bench(settings(tmp_path, trace, page=str(page)), MACHINE)
    assert [words[0] for words in program.calls] == ["train", "evaluate"]
    assert program.calls[0][program.calls[0].index("--max-minutes") + 1] == "2.0"
    assert bench(settings(tmp_path, trace), MACHINE)["arms"] == first["arms"]
    assert len(program.calls) == 2
    arm = first["arms"]["small.sru_attention.2min.seed0"]
    assert arm["recall"] == {"token": 0.6}
    assert arm["free"] == {"token": 0.5}
    assert arm["recovered_share"] == 0.4
    assert "recall token 0.600 (free 0.500), recovers 0.400 of the gap" in describe(first)
    text = page.read_text()
    assert "| sru_attention | 2 | 0 | **0.600** | 0.590 to 0.610 | +0.100 (+0.090 to +0.110) | **0.400** |" in text
    assert "| token_table (free) | - | - | 0.500 |" in text
    assert "/some/where" not in text + json.dumps(first)
    bench(settings(tmp_path, trace, minutes=3.0), MACHINE)
    bench(settings(tmp_path, trace, seed=1), MACHINE)
    assert len(program.calls) == 6, "other minutes and another seed are other cells"


def test_a_stopped_run_goes_on(program, tmp_path, trace):
    program.fail = "evaluate"
    with pytest.raises(DataError, match="evaluate"):
        bench(settings(tmp_path, trace), MACHINE)
    program.fail = ""
    bench(settings(tmp_path, trace), MACHINE)
    assert [words[0] for words in program.calls] == ["train", "evaluate", "evaluate"]


def test_a_stopped_training_is_resumed(program, tmp_path, trace):
    run = tmp_path / "cells" / "small.sru_attention.2min.seed0" / "run"
    run.mkdir(parents=True)
    (run / "last.ckpt").write_bytes(b"")
    bench(settings(tmp_path, trace), MACHINE)
    words = program.calls[0]
    assert words[words.index("--resume") + 1] == "true"


def test_a_cell_of_another_trace_is_refused(program, tmp_path, trace):
    bench(settings(tmp_path, trace), MACHINE)
    trace.write_bytes(b"another trace")
    with pytest.raises(DataError, match="made from another trace"):
        bench(settings(tmp_path, trace), MACHINE)


def test_a_page_from_what_is_stored(program, tmp_path, trace):
    with pytest.raises(DataError, match="holds no results"):
        bench(settings(tmp_path, trace, stored_only=True), MACHINE)
    bench(settings(tmp_path, trace), MACHINE)
    bench(settings(tmp_path, trace, stored_only=True, families="mlp"), MACHINE)
    assert len(program.calls) == 2


def test_pages_sort_by_recall_and_name_the_machine():
    def result(config: str, recall: float) -> dict[str, Any]:
        cell = {"label": "one", "trace": "t.npz", "config": config, "minutes": 8.0, "seed": 0}
        return {"cell": cell, "machine": MACHINE, "evaluation": evaluation(recall)}

    page = results_page([result("worse", 0.55), result("better", 0.65)])
    assert page.index("| better |") < page.index("| worse |")
    assert "made-up, 2 cores, 4.0 GiB; Python 3.11, torch 2.13; accelerator: none" in page


def test_a_cell_may_be_tested_on_another_trace(program, tmp_path, trace, monkeypatch):
    other = tmp_path / "dev.npz"
    other.write_bytes(b"another trace")
    told = evaluation(0.8)
    told["horizons"] = {"batch": told["horizons"]["token"]}
    for figure in (told["horizons"]["batch"], told["horizons"]["batch"]["free"]["token_table"]):
        figure["recall_at"] = {"1": 0.8, "3": 0.95}
    monkeypatch.setattr(cells, "_foregate", lambda words: told if words[0] == "evaluate" else program(words))
    page = tmp_path / "page.md"
    monkeypatch.setattr(predictors, "_check_pair", lambda paths: None)  # they are no traces here
    first = bench(settings(tmp_path, trace, page=str(page), traces=f"{trace}+{other}"), MACHINE)
    assert list(first["arms"]) == ["small.sru_attention.2min.seed0.on-dev.npz"]
    assert "## small, tested on dev.npz" in page.read_text()
    assert "| 0.790 to 0.810 | **0.9500** | +0.300" in page.read_text()
    other.write_bytes(b"changed")
    with pytest.raises(DataError, match="made from another trace"):
        bench(settings(tmp_path, trace, traces=f"{trace}+{other}"), MACHINE)
    with pytest.raises(SettingError, match=r"TRAINED or TRAINED\+TESTED"):
        bench(settings(tmp_path, trace, traces=f"{trace}+{trace}+{trace}"), MACHINE)


def test_a_trace_to_test_on_is_looked_at_before_training(program, tmp_path, write):
    one = write(tmp_path / "one.npz")
    none = tmp_path / "none.npz"
    none.write_bytes(b"no trace")
    with pytest.raises(TraceError, match=r"no readable \.npz trace"):
        bench(settings(tmp_path, one, traces=f"{one}+{none}"), MACHINE)
    larger = tmp_path / "larger.npz"
    with np.load(one) as file:
        arrays = dict(file)
    np.savez(larger, **(arrays | {"experts": arrays["experts"] + 9}))
    with pytest.raises(DataError, match="name another"):
        bench(settings(tmp_path, one, traces=f"{one}+{larger}"), MACHINE)
    for wrong in (f"{one}+", f"+{one}", f"{one}+{one}+{one}"):
        with pytest.raises(SettingError, match=r"TRAINED or TRAINED\+TESTED"):
            bench(settings(tmp_path, one, traces=wrong), MACHINE)
    assert not program.calls


def test_traces_of_one_name_are_refused(program, tmp_path, trace):
    (tmp_path / "below").mkdir()
    other = tmp_path / "below" / trace.name
    other.write_bytes(b"another trace")
    with pytest.raises(SettingError, match="must differ by name"):
        bench(settings(tmp_path, trace, traces=f"{trace},{other}"), MACHINE)


def test_damaged_cells_are_named(program, tmp_path, trace):
    bench(settings(tmp_path, trace), MACHINE)
    (stored,) = tmp_path.glob("cells/*/cell.json")
    whole = stored.read_text()
    for damage in (whole[:50], "{}", "[]"):
        stored.write_text(damage)
        for only in (False, True):
            with pytest.raises(DataError, match=r"cell\.json is damaged .* remove"):
                bench(settings(tmp_path, trace, stored_only=only), MACHINE)


def test_a_cell_killed_after_its_export_goes_on(program, tmp_path, trace):
    own = tmp_path / "cells" / "small.sru_attention.2min.seed0"
    program.fail = "evaluate"
    with pytest.raises(DataError, match="evaluate"):
        bench(settings(tmp_path, trace), MACHINE)
    program.fail = ""
    (own / "train.json").unlink()  # as a kill between the export and the note of it leaves the folder
    assert (own / "bundle").is_dir()
    bench(settings(tmp_path, trace), MACHINE)
    assert [words[0] for words in program.calls] == ["train", "evaluate", "train", "evaluate"]


def test_a_trace_that_changes_before_the_cell_is_done_is_refused(program, tmp_path, trace):
    program.fail = "evaluate"
    with pytest.raises(DataError, match="evaluate"):
        bench(settings(tmp_path, trace), MACHINE)
    program.fail = ""
    trace.write_bytes(b"another trace")
    with pytest.raises(DataError, match="made from another trace"):
        bench(settings(tmp_path, trace), MACHINE)


def test_whole_categories_held_out_are_cells_of_their_own(program, tmp_path, trace):
    page = tmp_path / "page.md"
    bench(settings(tmp_path, trace), MACHINE)
    found = bench(settings(tmp_path, trace, split_by="category", page=str(page)), MACHINE)
    assert set(found["arms"]) == {"small.sru_attention.2min.seed0", "small.sru_attention.2min.seed0.by-category"}
    words = [call for call in program.calls if call[0] == "train"][1]
    assert words[words.index("--data.split.by") + 1] == "category"
    assert "## small, held out by category" in page.read_text()


def test_bad_settings_are_refused(tmp_path):
    for minutes in (0, float("nan"), float("inf")):
        with pytest.raises(SettingError, match="minutes"):
            PredictorsBench(minutes=minutes)
    with pytest.raises(SettingError, match="page must lie in a folder"):
        PredictorsBench(page=str(tmp_path / "none" / "p.md"))
    with pytest.raises(SettingError, match="families must be configs"):
        PredictorsBench(families=str(tmp_path / "my.yaml"))
    with pytest.raises(SettingError, match="no_such"):
        PredictorsBench(families="no_such")
    with pytest.raises(DataError, match="FOREGATE_SHARED"):
        bench(PredictorsBench(traces=str(tmp_path / "none.npz"), cells=str(tmp_path)), MACHINE)


def test_every_family_of_the_default_is_a_config():
    assert set(predictors.CAUSAL) <= set(predictors.config_names("train"))
