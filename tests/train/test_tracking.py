"""What a training run tells its trackers: W&B offline, files, or nobody."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import wandb
from foregate.collect.errors import SettingError
from foregate.predictors.sru_attention import SruAttentionSettings
from foregate.train import fit as fit_file
from foregate.train.data import TraceData
from foregate.train.fit import FitSettings, fit
from foregate.train.module import PredictorModule
from foregate.train.tracking import open_logger
from lightning.pytorch.loggers import WandbLogger

SMALL = SruAttentionSettings(embedding=16, hidden=32, attention=8, window=8, dropout=0.1)
CARD = {
    "family": "sru_attention",
    "settings": SMALL.to_json(),
    "training": {"steps": 4},
    "metrics": {"recall_at_k": 0.5, "baselines": {"popularity": 0.25}},
    "latency_ms": {"p50": 1.0},
}


def payloads(log: bytes) -> bytes:
    """Join what a W&B log holds: records of 7 header bytes and a payload, cut where a block of 32 KiB ends."""
    out, at = b"", 7
    while at + 7 <= len(log):
        if 32768 - at % 32768 < 7:  # no room for a header: the block's rest is empty
            at += 32768 - at % 32768
            continue
        length = int.from_bytes(log[at + 4 : at + 6], "little")
        out, at = out + log[at + 7 : at + 7 + length], at + 7 + length
    return out


@pytest.mark.filterwarnings("ignore::DeprecationWarning:wandb")
@pytest.mark.filterwarnings("ignore::DeprecationWarning:pydantic")
def test_an_offline_run_is_written_down_with_its_artifacts(trace, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")

    def export(module, data, out, run):
        out = Path(out)
        out.mkdir()
        (out / "card.json").write_text("{}")
        return SimpleNamespace(spec=module.network.spec, card=CARD, path=out)

    monkeypatch.setattr(fit_file, "export", export)
    logger = open_logger("wandb", tmp_path / "run", "test")
    data, module = TraceData(trace), PredictorModule(SMALL)
    fit(
        data,
        module,
        tmp_path / "bundle",
        FitSettings(max_steps=4, validate_steps=2),
        run_dir=tmp_path / "run",
        logger=logger,
    )
    wandb.teardown()  # its service writes the end of the log after the run was finished
    (run,) = (tmp_path / "run" / "wandb").glob("offline-run-*")
    (record,) = run.glob("*.wandb")
    written = payloads(record.read_bytes())
    for text in (
        b"sru_attention-bundle",
        b"sru_attention-checkpoint",
        b"card.json",
        b"validation_recall",
        b"test_recall_at_k",
    ):
        assert text in written, text


@pytest.mark.filterwarnings("ignore::DeprecationWarning:wandb")
@pytest.mark.filterwarnings("ignore::DeprecationWarning:pydantic")
def test_a_resumed_run_is_the_same_run(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    ids = []
    for resume in (False, True, False):
        logger = open_logger("wandb", tmp_path / "run", "test", resume=resume)
        assert isinstance(logger, WandbLogger)
        ids.append(logger.experiment.id)
        logger.experiment.finish()
    wandb.teardown()
    assert ids[0] == ids[1] != ids[2]
    assert (tmp_path / "run" / "wandb_run_id").read_text().strip() == ids[2]
    folders = (tmp_path / "run" / "wandb").glob("offline-run-*")  # offline-run-TIME-ID, then -1 where that is taken
    assert {path.name.split("-")[3] for path in folders} == set(ids)


def test_csv_and_no_tracking(trace, no_export, tmp_path, monkeypatch):
    logger = open_logger("csv", tmp_path / "run", "test")
    monkeypatch.setattr(fit_file, "log_results", lambda *args: None)
    fit(
        TraceData(trace),
        PredictorModule(SMALL),
        tmp_path / "b",
        FitSettings(max_steps=4, validate_steps=2),
        logger=logger,
    )
    assert "validation_recall" in next((tmp_path / "run").rglob("metrics.csv")).read_text()
    assert open_logger("none", tmp_path / "no", "test") is None
    assert not (tmp_path / "no").exists()
    with pytest.raises(SettingError, match="tracker"):
        open_logger("tensorboard", tmp_path, "x")  # pyright: ignore
    monkeypatch.setenv("WANDB_MODE", "sideways")
    with pytest.raises(SettingError, match="WANDB_MODE"):
        open_logger("wandb", tmp_path, "x")
