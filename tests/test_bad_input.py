"""Bad input from outside: each is one sentence and an exit code, and nothing half-written stays behind."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import transformers  # noqa: F401  # its log handler must not be made while standard error is captured
from foregate.cli.main import main
from foregate.runtime import models

MODEL = "foregate-mini"


def npz(path: Path, *, layers: int = 2, experts: int = 4) -> Path:
    """Write a small one-file trace."""
    chosen = np.random.default_rng(0).integers(0, experts, (60, layers, 1), dtype=np.uint8)
    ids = np.arange(60, dtype=np.int32) % 7
    np.savez(path, experts=chosen, offsets=np.array([0, 20, 40, 60]), token_ids=ids)
    return path


def dense_model(folder: Path) -> Path:
    """Write a model without MoE layers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=4096, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(models.path(MODEL) / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pack the mini model once."""
    folder = tmp_path_factory.mktemp("packed") / "store"
    assert main(["pack", MODEL, "--out", str(folder)]) == 0
    return folder


Failure = Callable[[list[str]], str]


@pytest.fixture
def failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Failure:
    """Run a command that must fail in one sentence and leave the folder as it was; give the sentence."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FOREGATE_DATA", raising=False)

    def run(argv: list[str]) -> str:
        before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
        capfd.readouterr()
        code = main(argv)
        out, err = capfd.readouterr()
        assert code in (1, 2), (code, err)
        assert out == ""
        last = err.rstrip("\n").splitlines()[-1]
        assert last.startswith(f"foregate {argv[0]}: "), err
        assert "unexpected" not in last
        assert "Traceback" not in err
        after = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
        assert after == before, "something was left behind or changed"
        return last

    return run


def test_a_missing_trace(failure: Failure) -> None:
    assert "nowhere" in failure(["train", "--trace", "nowhere", "--out", "bundle"])


def test_a_file_that_is_no_trace(failure: Failure, tmp_path: Path) -> None:
    (tmp_path / "a.npz").write_bytes(b"no zip")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "trace.json").write_text("{}", encoding="utf-8")
    assert "a.npz" in failure(["train", "--trace", "a.npz", "--out", "bundle"])
    assert "trace.json" in failure(["train", "--trace", "folder", "--out", "bundle"])


def test_validate_says_what_is_no_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.npz").write_bytes(b"no zip")
    for name in ("nowhere", "a.npz"):
        assert main(["validate", name, "--json"]) == 1
        out, err = capsys.readouterr()
        assert json.loads(out)["ok"] is False
        assert name in json.dumps(json.loads(out)["problems"])
        assert err == ""


def test_a_missing_data_set(failure: Failure, tmp_path: Path) -> None:
    assert "no/such/set" in failure(["collect", "--model", MODEL, "--data", "no/such/set", "--out", "trace"])
    assert "no.jsonl" in failure(["collect", "--model", MODEL, "--data", "no.jsonl", "--out", "trace"])


def test_local_glue_that_is_not_there(failure: Failure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREGATE_DATA", str(tmp_path / "empty"))
    assert "empty" in failure(["collect", "--model", MODEL, "--data", "glue/sst2", "--out", "trace"])


@pytest.mark.parametrize("command", ["pack", "inflate"])
def test_a_model_that_is_not_there(failure: Failure, command: str) -> None:
    more = ["--expert-mib", "1"] if command == "inflate" else []
    assert "no-such-model" in failure([command, "no-such-model", "--out", "out", *more])


@pytest.mark.parametrize("command", ["collect", "pack", "inflate"])
def test_a_model_without_moe_layers(failure: Failure, tmp_path: Path, command: str) -> None:
    model = str(dense_model(tmp_path / "dense"))
    argv = {
        "collect": ["collect", "--model", model, "--data", "topics", "--out", "out", "--max-sequences", "2"],
        "pack": ["pack", model, "--out", "out"],
        "inflate": ["inflate", model, "--out", "out", "--expert-mib", "1"],
    }[command]
    assert "MoE" in failure(argv)


def test_a_trace_of_another_model(failure: Failure, tmp_path: Path) -> None:
    assert main(["collect", "--model", MODEL, "--data", "topics", "--out", "trace", "--max-sequences", "2"]) == 0
    header = json.loads((tmp_path / "trace" / "trace.json").read_text(encoding="utf-8"))
    header["model_fingerprint"] = "0" * 16
    (tmp_path / "trace" / "trace.json").write_text(json.dumps(header), encoding="utf-8")
    argv = ["collect", "--model", MODEL, "--data", "topics", "--out", "trace", "--max-sequences", "4", "--resume"]
    assert "trace" in failure(argv)


def test_a_bundle_for_another_topology(failure: Failure, tmp_path: Path, store: Path) -> None:
    trace = str(npz(tmp_path / "other.npz"))
    argv = ["train", "--trace", trace, "--out", "bundle", "--max-minutes", "0.02", "--tracker", "csv"]
    assert main(argv) == 0
    text = failure(["generate", str(store), "--predictor", "bundle", "--slots", "0.5", "--prompt", "a"])
    assert "6" in text  # both topologies are named: MoE layers of the model ..
    assert "2" in text  # .. and of the bundle


def test_a_bundle_that_is_none(failure: Failure, tmp_path: Path, store: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "empty" in failure(["generate", str(store), "--predictor", "empty", "--prompt", "a"])
    trace = str(npz(tmp_path / "other.npz"))
    assert "empty" in failure(["evaluate", "empty", trace])


def test_a_truncated_store(failure: Failure, tmp_path: Path, store: Path) -> None:
    copy = tmp_path / "store"
    shutil.copytree(store, copy)
    file = sorted(copy.glob("experts-*.safetensors"))[-1]
    with open(file, "r+b") as opened:
        opened.truncate(file.stat().st_size // 2)
    assert file.name in failure(["generate", str(copy), "--prompt", "a"])


def test_a_folder_that_is_no_store(failure: Failure, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "empty" in failure(["generate", "empty", "--prompt", "a"])
    assert "missing" in failure(["generate", "missing", "--prompt", "a"])


@pytest.mark.parametrize("words", [["--slots", "0"], ["--slots", "1.5"], ["--budget", "many"], ["--mode", "sometimes"]])
def test_settings_out_of_range(failure: Failure, store: Path, words: list[str]) -> None:
    assert words[1] in failure(["generate", str(store), "--prompt", "a", *words])


@pytest.mark.parametrize(
    "words",
    [
        ["--seed", "-1"],
        ["--seed", str(2**64)],
        ["--temperature", "1e-40"],
        ["--temperature", "nan"],
        ["--threads", "65"],
    ],
)
def test_generation_settings_that_would_break_later(failure: Failure, store: Path, words: list[str]) -> None:
    assert words[1] in failure(["generate", str(store), "--prompt", "a", *words])


def test_a_prompt_longer_than_the_model_reads(failure: Failure, tmp_path: Path, store: Path) -> None:
    (tmp_path / "long").write_text("word " * 1100, encoding="utf-8")
    assert "1024 positions" in failure(["generate", str(store), "--slots", "0.5", "--prompt-file", "long"])


def test_a_prompt_that_is_no_text(failure: Failure, tmp_path: Path, store: Path) -> None:
    assert "UTF-8" in failure(["generate", str(store), "--prompt", "caf\udce9"])
    (tmp_path / "latin").write_bytes(b"caf\xe9 noir")
    assert "latin" in failure(["generate", str(store), "--prompt-file", "latin"])


def test_a_tokenizer_of_another_model(failure: Failure, tmp_path: Path, store: Path) -> None:
    copy = tmp_path / "store"
    shutil.copytree(store, copy)
    tokenizer = json.loads((copy / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = tokenizer["model"]["vocab"]
    tokenizer["model"]["vocab"] = {token: number + 100_000 for token, number in vocabulary.items()}
    (copy / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    assert "tokenizer of another model" in failure(["generate", str(copy), "--slots", "0.5", "--prompt", "a"])


def test_a_checkpoint_that_is_none(failure: Failure, tmp_path: Path) -> None:
    (tmp_path / "a.ckpt").write_bytes(b"nothing")
    assert "a.ckpt" in failure(["export", "a.ckpt", "--out", "bundle"])
    assert "b.ckpt" in failure(["export", "b.ckpt", "--out", "bundle"])
