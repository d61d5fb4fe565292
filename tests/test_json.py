"""With --json a command puts one JSON value on standard output and nothing else, with the keys others rely on."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from foregate.cli.main import main

MODEL = "foregate-mini"
Values = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give the folder that the commands of this file share; they run in order."""
    return tmp_path_factory.mktemp("json")


@pytest.fixture
def values(folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Values:
    """Run a command and give its value; what libraries write on the file descriptor counts too."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("FOREGATE_SMOKE", "1")

    def run(*argv: str, code: int = 0) -> dict[str, Any]:
        capfd.readouterr()
        found = main([*argv, "--json"])
        out, err = capfd.readouterr()
        assert found == code, err[-2000:]
        value = json.loads(out)  # raises on anything beside the one value
        assert isinstance(value, dict)
        return value

    return run


def test_collect_and_validate(values: Values) -> None:
    made = values("collect", "--model", MODEL, "--config", "topics", "--out", "trace")
    assert {"sequences", "tokens"} <= set(made)
    assert values("validate", "trace") == {"ok": True, "problems": [], "more": False}


def test_import_merge_simulate_and_assess(values: Values, folder: Path) -> None:
    experts = np.random.default_rng(0).permuted(np.tile(np.arange(8, dtype=np.uint8), (40, 3, 1)), axis=-1)[..., :2]
    for name in ("one", "two"):
        np.savez(folder / f"{name}.npz", experts=experts, offsets=np.array([0, 10, 40]))
    made = values("import", "one.npz", "--out", "imported")
    assert (made["sequences"], made["tokens"], made["rows_read"], made["rows_dropped"]) == (2, 40, 40, {})
    merged = values("merge", "one.npz", "two.npz", "--out", "both")
    assert (merged["sequences"], merged["tokens"]) == (4, 80)
    replayed = values("simulate", "imported", "--capacity", "0.25", "--as", "decode", "--policies", "lru,belady")
    assert {"tokens", "capacity", "accesses", "policies"} <= set(replayed)
    assert (replayed["tokens"], replayed["capacity"], replayed["accesses"]) == (40, 6, 240)
    assert {"misses", "miss_rate", "recovered_share"} <= set(replayed["policies"]["belady"])
    assessed = values("assess", "imported")
    assert {"verdict", "gains", "curves", "signals", "overlap", "coverage", "load", "contamination"} <= set(assessed)


def test_train_evaluate_and_export(values: Values, folder: Path) -> None:
    made = values("train", "--trace", "trace", "--out", "bundle", "--max-minutes", "0.1", "--fit.max_steps", "3")
    assert made["bundle"] == "bundle"
    assert made["family"] == "copy_attention"
    assert {"recall_at_k", "baselines"} <= set(made["metrics"])
    report = values("evaluate", "bundle", "trace")
    wanted = {"horizons", "recall_at_k", "recall_at", "baselines", "interval", "recovered_share", "latency_ms"}
    assert wanted <= set(report)
    assert {"p50", "p99"} <= set(report["latency_ms"])
    (checkpoint, *_) = sorted(folder.glob("bundle.run/**/*.ckpt"))
    assert values("export", str(checkpoint), "--out", "again")["bundle"] == "again"


def test_inflate_pack_generate_and_verify(values: Values) -> None:
    values("inflate", MODEL, "--out", "wide", "--expert-mib", "0.1")
    values("pack", "wide", "--out", "store")
    made = values(
        "generate", "store", "--predictor", "bundle", "--slots", "0.25", "--prompt", "The film", "--max-new-tokens", "4"
    )
    assert {"text", "token_ids", "stats"} <= set(made)
    assert len(made["token_ids"]) <= 4
    checked = values("verify", "store", "--slots", "0.25", "--tokens", "4")
    assert {"identical", "tokens", "max_abs_diff"} <= set(checked)
    assert checked["identical"] is True
