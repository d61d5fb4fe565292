"""`foregate export --push`: the place is checked before the export, the bundle is pushed after it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from foregate.cli.main import main
from foregate.predictors import hub
from foregate.train import export as export_file
from foregate.train.module import PredictorModule


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
    calls: list[tuple] = []
    metrics = {"recall_at_k": 0.5, "beats_free": True}
    bundle = SimpleNamespace(spec=SimpleNamespace(family="small"), card={"metrics": metrics, "verdict": "It does."})

    def push(given: object, repo: str) -> str:
        calls.append(("push", given, repo))
        return "address"

    monkeypatch.setattr(PredictorModule, "load", lambda path: calls.append(("load", path)))
    monkeypatch.setattr(export_file, "data_of", lambda *_: None)
    monkeypatch.setattr(export_file, "export", lambda *_: bundle)
    monkeypatch.setattr(hub, "push_to_hub", push)
    monkeypatch.chdir(tmp_path)
    Path("run.ckpt").write_text("x")
    return calls


def test_it_pushes_what_it_exported(made: list[tuple], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", "run.ckpt", "--out", "b", "--push", "me/small", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["pushed"] == "address"
    assert made[-1][0] == "push"
    assert made[-1][2] == "me/small"
    assert main(["export", "run.ckpt", "--out", "b", "--push", "hub:me/small"]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == ["It does.", "Pushed: address"]


def test_without_push_nothing_is_pushed(made: list[tuple], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", "run.ckpt", "--out", "b", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["pushed"] is None
    assert [call[0] for call in made] == ["load"]


@pytest.mark.parametrize("repo", ["small", "../small", "me/small@v1", ""])
def test_no_place_to_push_to_is_noticed_first(repo: str, made: list[tuple], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", "run.ckpt", "--out", "b", "--push", repo]) == 2
    err = capsys.readouterr().err
    assert "OWNER/NAME" in err
    assert err.count("\n") == 1
    assert made == []
