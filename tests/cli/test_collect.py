"""`foregate collect` and `foregate validate`: output, exit codes, one sentence for each mistake."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from foregate.cli.main import main
from foregate.cli.options import settings_from
from foregate.collect import tiny_models
from foregate.collect.collection import CollectConfig
from foregate.collect.trace import Trace
from foregate.configs import config_names, find_config


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    """Save a tiny model as a checkpoint."""
    folder = tmp_path_factory.mktemp("model") / "tiny"
    tiny_models.build("qwen3_moe").save_pretrained(folder)
    tiny_models.tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture
def text(tmp_path) -> str:
    """Write a text of three paragraphs."""
    path = tmp_path / "some.txt"
    path.write_text("One.\n\nTwo and two.\n\nThree.\n")
    return str(path)


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    capsys.readouterr()
    code = main(list(words))
    return (code, *capsys.readouterr())


def test_collect_then_validate(capsys, tmp_path, model, text) -> None:
    out = str(tmp_path / "trace")
    code, printed, _ = run(capsys, "collect", "--model", model, "--data", text, "--out", out, "--json")
    assert code == 0
    value = json.loads(printed)
    assert value["sequences"] == value["new_sequences"] == 3
    assert value["tokens"] == 22
    assert value["trace"] == out
    assert value["seconds"] > 0
    code, printed, _ = run(capsys, "validate", out, "--json")
    assert (code, json.loads(printed)) == (0, {"ok": True, "problems": [], "more": False})
    code, printed, _ = run(capsys, "validate", out)
    assert (code, printed) == (0, f"{out}: ok\n")
    code, printed, _ = run(capsys, "collect", "--model", model, "--data", text, "--out", out, "--resume")
    assert code == 0
    assert printed.startswith(f"{out}: 3 sequences (0 of them new), 22 tokens")


def test_validate_names_problems_and_exits_with_1(capsys, tmp_path, model, text) -> None:
    out = tmp_path / "trace"
    run(capsys, "collect", "--model", model, "--data", text, "--out", str(out))
    shard = next(out.glob("shard-*"))
    shard.write_bytes(shard.read_bytes()[:-10])
    code, printed, error = run(capsys, "validate", str(out), "--json")
    value = json.loads(printed)
    assert (code, value["ok"], error) == (1, False, "")
    assert value["problems"][0]["file"] == str(shard)
    assert "is damaged" in value["problems"][0]["reason"]
    code, printed, _ = run(capsys, "validate", str(tmp_path / "absent"))
    assert code == 1
    assert "is no routing trace" in printed
    assert printed.endswith("not ok\n")


def test_flags_reach_the_settings(capsys, tmp_path, model, text) -> None:
    out = str(tmp_path / "trace")
    words = ["--max-sequences", "2", "--max-tokens", "3", "--overflow", "cut", "--generate", "2", "--with-text"]
    words += ["--scores", "--shard-rows", "1"]
    code, _, _ = run(capsys, "collect", "--model", model, "--data", text, "--out", out, *words, "--seed", "9")
    assert code == 0
    trace = Trace.open(out)
    assert trace.header.seed == 9
    assert trace.header.scores == "selection"
    assert len(trace.shards) == 2
    rows = list(trace)
    assert [row.scores.shape for row in rows] == [(row.num_tokens, 2 * 8) for row in rows]
    assert [row.prompt_tokens for row in rows] == [3, 3]
    assert [row.text[:3] for row in rows if row.text] == ["One", "Two"]


def test_smoke_cuts_the_sizes(capsys, tmp_path, model, monkeypatch) -> None:
    monkeypatch.setenv("FOREGATE_SMOKE", "1")
    words = ["--data", "topics", "--max-tokens", "8", "--overflow", "cut", "--out", str(tmp_path / "trace"), "--json"]
    code, printed, _ = run(capsys, "collect", "--model", model, *words)
    assert code == 0
    assert json.loads(printed)["sequences"] == 24


@pytest.mark.parametrize(
    ("change", "code", "reason"),
    [
        ({"--model": "absent/model"}, 1, "absent/model cannot be loaded"),
        ({"--data": "absent.txt"}, 1, "absent.txt does not exist"),
        ({"--data": "glue/cola"}, 1, "glue/cola is unknown"),
        ({"--out": "."}, 1, "give --out a folder"),
        ({"--max-tokens": "0"}, 2, "--max-tokens must be at least 1, got 0"),
        ({"--max-tokens": "many"}, 2, "--max-tokens must be a whole number, got 'many'"),
        ({"--overflow": "wrap"}, 2, "wrap"),
        ({"--config": "absent"}, 2, "config must be the path of a YAML file or one of generate, mrpc"),
        ({"--nonsense": "1"}, 2, "--nonsense"),
    ],
)
def test_each_mistake_is_one_line(capsys, tmp_path, model, text, monkeypatch, change, code, reason) -> None:
    monkeypatch.chdir(tmp_path)
    given = {"--model": model, "--data": text, "--out": str(tmp_path / "trace"), **change}
    got, printed, error = run(capsys, "collect", *(word for pair in given.items() for word in pair))
    lines = [line for line in error.splitlines() if line.startswith("foregate collect: ")]
    assert (got, printed, len(lines)) == (code, "", 1)
    assert reason in lines[0]
    assert "Traceback" not in error
    assert not (tmp_path / "trace").exists()


def test_missing_arguments_are_wrong_usage(capsys) -> None:
    assert run(capsys, "collect")[0] == 2
    assert run(capsys, "validate")[0] == 2


@pytest.mark.parametrize("name", config_names("collect"))
def test_packaged_configs_load(name: str) -> None:
    from foregate.cli import collect

    parser = collect.parser()
    args = parser.parse_args(["--config", name, "--model", "m", "--out", "o"])
    config = settings_from(args, CollectConfig)
    assert config.data.startswith(("glue/", "topics"))
    assert find_config("collect", name).read_text().startswith("# ")


def test_there_are_packaged_configs() -> None:
    assert {"sst2", "mrpc", "topics", "generate"} <= set(config_names("collect"))


def test_mini_models_are_found_by_name(capsys, tmp_path) -> None:
    from foregate.runtime import models

    for name in models.names():
        if not (models.path(name) / "model.safetensors").is_file():
            pytest.skip(f"{name} has no weights in this checkout")
        out = tmp_path / name
        words = ["--data", "topics", "--max-sequences", "2", "--max-tokens", "16", "--out", str(out)]
        code, _, error = run(capsys, "collect", "--model", name, *words)
        assert code == 0, error
        assert Trace.open(out).header.model == name


def test_a_packed_store_records_as_the_model_does(capsys, tmp_path, model, text) -> None:
    from foregate.runtime.pack import pack

    pack(Path(model), tmp_path / "store")
    traces = []
    for name in (model, str(tmp_path / "store")):
        out = tmp_path / f"trace {len(traces)}"
        code, _, error = run(capsys, "collect", "--model", name, "--data", text, "--out", str(out), "--generate", "3")
        assert code == 0, error
        traces.append(Trace.open(out))
    resident, offloaded = traces
    assert resident.header.topology == offloaded.header.topology
    assert resident.header.model_fingerprint == offloaded.header.model_fingerprint
    for a, b in zip(resident, offloaded, strict=True):
        assert a.token_ids.tolist() == b.token_ids.tolist()
        assert a.experts.tolist() == b.experts.tolist()


def test_a_config_file_of_ones_own(capsys, tmp_path: Path, model, text) -> None:
    path = tmp_path / "own.yaml"
    path.write_text(f"model: {model}\ndata: {text}\nmax_sequences: 1\nout: {tmp_path / 'trace'}\n")
    code, printed, _ = run(capsys, "collect", "--config", str(path), "--json")
    assert (code, json.loads(printed)["sequences"]) == (0, 1)
