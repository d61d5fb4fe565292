"""Training end to end on a small trace: it learns, it can be resumed, it exports what it says."""

from __future__ import annotations

import json
import logging
import signal

import numpy as np
import pytest
import torch
from foregate.cli.main import main
from foregate.collect.errors import DataError, SettingError
from foregate.predictors.bundle import Bundle, load_predictor
from foregate.predictors.scoring import measure, own_k
from foregate.predictors.sru_attention import SruAttentionSettings
from foregate.train.data import TraceData
from foregate.train.evaluate import evaluate
from foregate.train.export import data_of
from foregate.train.fit import FitSettings, fit, train
from foregate.train.module import PredictorModule
from foregate.train.split import SplitSettings

SMALL = SruAttentionSettings(embedding=16, hidden=32, attention=8, window=8, dropout=0.1)
STEPS = FitSettings(max_steps=40, validate_steps=10, max_epochs=1000)
RATES = {"learning_rate": 0.01}


@pytest.fixture(scope="module")
def trained(trace, tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    data, module = TraceData(trace, batch_tokens=256), PredictorModule(SMALL, **RATES)
    result = fit(data, module, folder / "bundle", STEPS, run_dir=folder / "run")
    return folder, result, data


def test_it_learns_and_says_how_well(trained):
    folder, result, data = trained
    metrics = result["metrics"]
    assert set(result) == {"bundle", "family", "horizon", "metrics", "latency_ms", "steps", "train_s", "export_s"}
    assert metrics["recall_at_k"] > max(metrics["baselines"].values()) + 0.02
    assert metrics["interval"][0] < metrics["recall_at_k"] < metrics["interval"][1]
    assert metrics["recall_at"]["2"] == metrics["recall_at_k"] <= metrics["recall_at"]["3"]
    assert set(metrics["baselines"]) == {"random", "popularity", "previous_token", "token_table"}
    predictor = load_predictor(folder / "bundle")
    assert measure(predictor, data.rows["test"]).recall(own_k(predictor)) == pytest.approx(
        metrics["recall_at_k"], abs=1e-4
    )
    card = Bundle.open(folder / "bundle").card
    assert card["training"]["sequences"] == {part: len(rows) for part, rows in data.rows.items()}
    assert card["calibration"]["expected_error"] < 0.1
    json.dumps(result)


def test_checkpoints_hold_no_pickled_objects_and_rebuild_the_module(trained):
    folder, _, data = trained
    for path in sorted((folder / "run").glob("*.ckpt")):
        torch.load(path, weights_only=True)
        module = PredictorModule.load(path)
        assert module.network_settings == SMALL
        again = data_of(module)
        assert [row.sequence for row in again.rows.get("test", []) or again.fitting_rows]
        assert again.split == data.split
    assert {path.name for path in (folder / "run").iterdir()} >= {"best.ckpt", "last.ckpt"}


def test_evaluation_leaves_out_what_training_saw(trained, trace, write, tmp_path):
    folder, result, data = trained
    report = evaluate(folder / "bundle", trace)
    assert report["left_out"] == len(data.fitting_rows)
    assert report["sequences"] == len(data.rows["test"])
    assert report["recall_at_k"] == pytest.approx(result["metrics"]["recall_at_k"], abs=1e-4)
    assert report["baselines"] == result["metrics"]["baselines"]
    assert report["recovered_share"] is None
    assert set(report["horizons"]) == {"token"}
    other = evaluate(folder / "bundle", write(tmp_path / "other.npz", sequences=6, seed=5))
    assert other["left_out"] == 0
    assert other["baselines_fitted_on"].startswith("the other half")
    assert other["recall_at_k"] > other["baselines"]["popularity"]


def test_evaluation_of_training_text_is_refused(trained, trace, tmp_path):
    folder, _, data = trained
    with np.load(trace) as file:
        keep = [int(row.sequence) for row in data.fitting_rows]
        pieces = [slice(file["offsets"][i], file["offsets"][i + 1]) for i in keep]
        arrays = {name: np.concatenate([file[name][piece] for piece in pieces]) for name in ("experts", "token_ids")}
        lengths = [piece.stop - piece.start for piece in pieces]
    np.savez(tmp_path / "seen.npz", offsets=np.concatenate([[0], np.cumsum(lengths)]), **arrays)
    with pytest.raises(DataError, match="has not seen"):
        evaluate(folder / "bundle", tmp_path / "seen.npz")


def test_same_seed_same_weights_and_the_global_generator_is_left_alone(trace, no_export, tmp_path):
    settings = FitSettings(max_steps=4, validate_steps=2)
    torch.manual_seed(123)
    wanted = torch.rand(3)
    torch.manual_seed(123)
    for seed in (0, 0, 1):
        data, module = TraceData(trace, split=SplitSettings(seed=0)), PredictorModule(SMALL)
        fit(data, module, tmp_path / "b", FitSettings(max_steps=4, validate_steps=2, seed=seed))
    assert settings.max_steps == 4
    torch.testing.assert_close(torch.rand(3), wanted)
    first, same, other = ([p.detach() for p in module.network.parameters()] for module in no_export)
    assert all(torch.equal(a, b) for a, b in zip(first, same, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_a_run_can_be_resumed(trace, no_export, tmp_path):
    settings = {"validate_steps": 2, "max_epochs": 1000}
    fit(
        TraceData(trace), PredictorModule(SMALL), tmp_path / "b", FitSettings(max_steps=4, **settings), run_dir=tmp_path
    )
    result = fit(
        TraceData(trace),
        PredictorModule(SMALL),
        tmp_path / "b",
        FitSettings(max_steps=10, **settings),
        run_dir=tmp_path,
        resume=True,
    )
    assert result["steps"] == 10
    with pytest.raises(SettingError, match="nothing to resume"):
        fit(TraceData(trace), PredictorModule(SMALL), tmp_path / "b", STEPS, run_dir=tmp_path / "new", resume=True)


def test_time_ends_a_run(trace, no_export, tmp_path):
    settings = FitSettings(max_minutes=0.02, max_epochs=10**6, validate_steps=10**6)
    result = fit(TraceData(trace), PredictorModule(SMALL), tmp_path / "b", settings)
    assert result["steps"] >= 1
    assert result["train_s"] < 30


def test_the_learning_rate_falls_with_whatever_limit_is_nearest(trace, no_export, tmp_path):
    module = PredictorModule(SMALL, learning_rate=0.01)
    fit(TraceData(trace), module, tmp_path / "b", FitSettings(max_steps=20, max_epochs=10**6, validate_steps=20))
    optimizer = module.trainer.optimizers[0]
    assert optimizer.param_groups[1]["lr"] < 0.01 * 0.1


def test_training_is_quiet(trace, no_export, tmp_path, capsys, caplog):
    with caplog.at_level(logging.INFO):
        train(trace, tmp_path / "b", max_steps=2, network=SMALL)
    out, err = capsys.readouterr()
    assert out == err == ""
    assert {record.name.split(".")[0] for record in caplog.records} <= {"foregate"}


@pytest.mark.parametrize("text", ["not a checkpoint", ""])
def test_other_files_are_no_checkpoints(text, tmp_path):
    (tmp_path / "x.ckpt").write_text(text)
    for path in (tmp_path / "x.ckpt", tmp_path / "nowhere.ckpt"):
        with pytest.raises(DataError, match="no checkpoint"):
            PredictorModule.load(path)


def test_commands(trace, trained, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sizes = {"embedding": 8, "hidden": 8, "attention": 4, "window": 4}
    flags = [word for name, value in sizes.items() for word in (f"--model.network.{name}", str(value))]
    words = ["train", "--config", "sru_attention", "--trace", str(trace), "--out", "b", "--max-minutes", "1", *flags]
    assert main([*words, "--fit.max_steps", "4", "--tracker", "none", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["bundle"] == "b"
    assert {"recall_at_k", "baselines"} <= set(result["metrics"])
    assert main(["export", "b.run/last.ckpt", "--out", "again", "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["metrics"]["recall_at_k"] == pytest.approx(result["metrics"]["recall_at_k"], abs=0.2)
    assert main(["evaluate", "b", str(trace), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["recall_at_k"] == pytest.approx(result["metrics"]["recall_at_k"], abs=1e-4)
    assert main(["evaluate", "b", str(trace)]) == 0
    assert "unseen sequences" in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again", "b", "b.run"]


def test_bad_input_is_one_sentence(trained, trace, write, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    bundle = str(trained[0] / "bundle")
    few = write(tmp_path / "few.npz", sequences=2)
    np.savez(tmp_path / "other.npz", experts=np.arange(60, dtype=np.uint8).reshape(20, 3, 1), offsets=np.array([0, 20]))
    for words, code, text in [
        (["train", "--trace", "nowhere", "--out", "b"], 1, "nowhere"),
        (["train", "--trace", str(few), "--out", "b"], 1, "at least 3 groups"),
        (["train", "--trace", str(trace), "--out", "b", "--config", "no_such"], 2, "sru_attention"),
        (["train", "--trace", str(trace), "--out", "b", "--model.network.hiden", "3"], 2, "hiden"),
        (["train", "--trace", str(trace), "--out", "b", "--fit.max_minutes", "0"], 2, "max_minutes"),
        (["export", "nowhere.ckpt", "--out", "b"], 1, "nowhere.ckpt does not exist"),
        (["evaluate", str(trace), str(trace)], 1, "no predictor bundle"),
        (["evaluate", bundle, str(tmp_path / "other.npz")], 1, "3 causal layers x 60 experts, top-1"),
    ]:
        assert main(words) == code, words
        err = capsys.readouterr().err
        assert text in err
        assert err.count("\n") == 1, err
    assert not (tmp_path / "b").exists()
    assert not (tmp_path / "b.run").exists()


@pytest.mark.parametrize("place", ["a model", "a file", "", "a file/b"])
def test_a_place_for_no_bundle_is_refused_before_training(place, trace, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(PredictorModule, "training_step", lambda *_: pytest.fail("trained"))
    (tmp_path / "a model").mkdir()
    for name in ("card.json", "config.json", "a file"):
        (tmp_path / ("" if name == "a file" else "a model") / name).write_text("mine")
    before = {path: path.is_file() and path.read_text() for path in tmp_path.rglob("*")}
    assert main(["train", "--trace", str(trace), "--out", place, "--tracker", "none"]) == 1
    err = capsys.readouterr().err.strip()
    assert err.startswith("foregate train: ")
    assert "unexpected" not in err
    assert {path: path.is_file() and path.read_text() for path in tmp_path.rglob("*")} == before


@pytest.mark.parametrize(("name", "value"), [("accelerator", "abacus"), ("precision", "31-true")])
def test_what_lightning_does_not_have_is_refused(name, value, trace, tmp_path):
    data, module = TraceData(trace, batch_tokens=256), PredictorModule(SMALL, **RATES)
    with pytest.raises(SettingError, match=value):
        fit(data, module, tmp_path / "b", FitSettings(max_steps=1, **{name: value}), run_dir=tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


def test_an_interrupt_stays_one(trace, tmp_path, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(PredictorModule, "training_step", interrupted)
    handler = signal.getsignal(signal.SIGINT)
    data, module = TraceData(trace, batch_tokens=256), PredictorModule(SMALL, **RATES)
    with pytest.raises(KeyboardInterrupt):
        fit(data, module, tmp_path / "b", FitSettings(max_steps=1))
    assert signal.getsignal(signal.SIGINT) is handler
    assert list(tmp_path.iterdir()) == []
