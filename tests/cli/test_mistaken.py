"""Something else than what a command reads: it is told what that is and what to do, at once."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from foregate.cli import main as program
from foregate.collect.errors import ModelError
from foregate.runtime import models

Refused = Callable[..., str]

ROUTE = {"type": "route", "token_idx": 0, "layer": 0}


@pytest.fixture
def refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Refused:
    """Run a command that must fail, without the network; give its only sentence."""

    def unreachable(*args: object, **kwargs: object) -> None:
        raise AssertionError("the network was asked")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(socket, "getaddrinfo", unreachable)

    def run(*words: str) -> str:
        assert program.main(list(words)) == 1
        out, err = capsys.readouterr()
        assert out == ""
        assert err.count(f"foregate {words[0]}: ") == 1
        assert "Error" not in err
        return err.rstrip("\n").rpartition(f"foregate {words[0]}: ")[2]

    return run


def touch(*names: str) -> None:
    """Make empty files and the folders that they are in."""
    for name in names:
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text("{}", encoding="utf-8")


def arguments(command: str, model: str) -> list[str]:
    """Give a command that reads a model."""
    return {
        "collect": ["collect", "--model", model, "--data", "topics", "--out", "x"],
        "pack": ["pack", model, "--out", "x"],
        "inflate": ["inflate", model, "--out", "x", "--expert-mib", "1"],
        "verify": ["verify", model],
        "bench": ["bench", "record", "--model", model],
    }[command]


@pytest.mark.parametrize("command", ["collect", "pack", "inflate", "verify", "bench"])
@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("foregate-minni", "There is no model folder 'foregate-minni'; did you mean 'foregate-mini'?"),
        ("foregate-mini-swich", "There is no model folder 'foregate-mini-swich'; did you mean 'foregate-mini-switch'?"),
        ("/nope/model", "There is no model folder /nope/model; give a model folder, one of"),
        ("./model", "There is no model folder ./model; give a model folder, one of"),
        ("../model", "There is no model folder ../model; give a model folder, one of"),
        ("a/b/c", "There is no model folder a/b/c; give a model folder, one of"),
        ("runs/nope", "The folder runs holds no model or store nope; give a model folder, one of"),
        ("file", "file is a file, no model; give a model folder, one of"),
    ],
)
def test_a_model_that_can_only_be_a_folder_is_refused_at_once(
    command: str, model: str, said: str, refused: Refused
) -> None:
    touch("file", "runs/other/config.json")
    assert refused(*arguments(command, model)).startswith(said)


@pytest.mark.parametrize("name", ["gpt2", "someone/foregate-mini", "Qwen/Qwen3-30B-A3B", "mistralai/Mixtral-8x7B-v0.1"])
def test_names_on_the_hub_go_through(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert models.find(name) == name


def test_folders_and_mini_models_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert models.find("foregate-mini") == str(models.path("foregate-mini"))
    Path("foregate-minni").mkdir()
    assert models.find("foregate-minni") == "foregate-minni"
    Path("foregate-minni").rmdir()
    with pytest.raises(ModelError, match="did you mean 'foregate-mini'"):
        models.find("foregate-minni")


TRACES = {
    "nope": "nope is no routing trace: it does not exist; give a folder written by",
    "trace/shard-0-0.parquet": "is no routing trace: it is one shard of a routing trace, the folder trace; give that",
    "load": "it is a load table, which has counts and no tokens; foregate assess reads it.",
    "store": "it is a packed store; foregate collect --model records one from it.",
    "model": "it is a model folder; foregate collect --model records one from it.",
    "bundle": "it is a predictor bundle; give a folder written by foregate collect",
    "last.ckpt": "it is a training checkpoint; give a folder written by foregate collect",
    "log.jsonl": "it is a file of another kind; foregate import log.jsonl --out TRACE makes one of",
    "note.md": "it is a file of another kind; give a folder written by",
    "above": "it has no trace.json but there is one in above/trace; give a folder written by",
    "empty": "it has no trace.json; give a folder written by",
}


def lay() -> None:
    """Lay one of each kind."""
    touch("trace/trace.json", "trace/shard-0-0.parquet", "load/load.json", "load/load.parquet", "store/foregate.json")
    touch("store/config.json", "model/config.json", "bundle/card.json", "last.ckpt", "log.jsonl", "note.md")
    touch("model/a.safetensors", "above/trace/trace.json", "run/checkpoints/last.ckpt")
    Path("empty").mkdir()


@pytest.mark.parametrize(
    ("command", "given"),
    [("simulate", given) for given in TRACES] + [("train", "nope"), ("assess", "bundle"), ("merge", "load")],
)
def test_what_is_no_trace(command: str, given: str, refused: Refused) -> None:
    lay()
    words = {"train": ["--trace", given, "--out", "x"], "merge": [given, "--out", "x"]}.get(command, [given])
    assert TRACES[given] in refused(command, *words)


def test_a_shard_that_is_to_be_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    lay()
    assert program.main(["validate", "trace/shard-0-0.parquet", "--json"]) == 1
    (problem,) = json.loads(capsys.readouterr().out)["problems"]
    assert "one shard of a routing trace, the folder trace; give that folder." in str(problem)


OTHERS = {
    "evaluate": (["evaluate", "nope", "trace"], "nope does not exist, where a predictor bundle was expected; give a"),
    "evaluate turned round": (
        ["evaluate", "trace", "bundle"],
        "trace is a routing trace, where a predictor bundle was",
    ),
    "export": (
        ["export", "nope.ckpt", "--out", "x"],
        "The checkpoint nope.ckpt does not exist; name a .ckpt file of the",
    ),
    "export of a run": (
        ["export", "run", "--out", "x"],
        "run is a folder, no checkpoint; give one in it, such as run/che",
    ),
    "export of a bundle": (
        ["export", "bundle", "--out", "x"],
        "bundle is a predictor bundle, no checkpoint; name a .ckpt",
    ),
    "generate": (
        ["generate", "nope", "--prompt", "a"],
        "nope does not exist, where a packed store was expected; give a",
    ),
    "generate of a model": (
        ["generate", "model", "--prompt", "a"],
        "give a folder that foregate pack wrote, as foregate p",
    ),
    "generate of a name": (
        ["generate", "foregate-mini", "--prompt", "a"],
        "as foregate pack foregate-mini --out STORE.",
    ),
    "import of a trace": (["import", "trace", "--out", "x"], "it needs no import: foregate validate trace checks it."),
    "import of a shard": (["import", "trace/shard-0-0.parquet", "--out", "x"], "foregate reads that folder as it is."),
    "import of a load table": (["import", "load", "--out", "x"], "it needs no import: foregate assess load reads it."),
    "import of a store": (["import", "store", "--out", "x"], "store is a packed store, not another tool's recording;"),
    "import of a model": (["import", "model", "--out", "x"], "foregate collect --model model records one."),
    "import of folders": (
        ["import", "run", "--out", "x"],
        "run holds no files but 1 folder (checkpoints); import each by",
    ),
    "import of traces": (
        ["import", "above", "--out", "x"],
        "above holds no files but 1 folder (trace); they are traces",
    ),
}


@pytest.mark.parametrize(("words", "said"), OTHERS.values(), ids=OTHERS)
def test_what_is_something_else(words: list[str], said: str, refused: Refused) -> None:
    lay()
    assert said in refused(*words)
    assert not Path("x").exists()


def test_the_files_of_several_models(refused: Refused) -> None:
    for name, layers, top_k in (("a", 3, 2), ("b", 5, 1)):
        experts = np.arange(8 * layers * top_k).reshape(8, layers, top_k) % 7
        Path("logs").mkdir(exist_ok=True)
        np.savez(f"logs/{name}.npz", experts=experts.astype(np.int16), offsets=np.array([0, 8]))
    said = refused("import", "logs", "--out", "x")
    assert said == (
        "logs holds files of several models, a.npz (3 MoE layers, top-2), b.npz (5 MoE layers, top-1); import those of "
        "each model by themselves."
    )


def test_a_damaged_file_among_those_of_one_model_keeps_its_own_error(refused: Refused) -> None:
    Path("logs").mkdir()
    experts = np.arange(24, dtype=np.int16).reshape(8, 3, 1) % 7
    np.savez("logs/a.npz", experts=experts, offsets=np.array([0, 8]))
    np.savez("logs/b.npz", experts=experts, offsets=np.array([0, 9]))
    assert "b.npz" in (said := refused("import", "logs", "--out", "x"))
    assert "several models" not in said
