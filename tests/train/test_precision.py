"""Half precision trains as well, and the bundle is in single precision."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from foregate.predictors.baselines import Popularity
from foregate.predictors.bundle import Bundle
from foregate.predictors.copy_attention import CopyAttentionSettings
from foregate.predictors.scoring import measure, own_k
from foregate.predictors.sru_attention import SruAttentionSettings
from foregate.train.data import TraceData
from foregate.train.fit import FitSettings, fit
from foregate.train.module import PredictorModule
from safetensors.numpy import load_file

SRU = SruAttentionSettings(embedding=8, hidden=16, attention=8, window=8, discount=0.5)
COPY = CopyAttentionSettings(embedding=8, hidden=16, heads=2, attention=8, window=8)


@pytest.fixture
def autocast(monkeypatch) -> list[bool]:
    """Note for each step whether it was computed in half precision."""
    seen: list[bool] = []
    losses = PredictorModule._losses

    def noted(self, batch, found):
        seen.append(torch.is_autocast_enabled("cpu"))
        return losses(self, batch, found)

    monkeypatch.setattr(PredictorModule, "_losses", noted)
    return seen


def fit_in_half(network, data, out):
    settings = FitSettings(max_steps=30, validate_steps=15, max_epochs=1000, precision="bf16-mixed")
    return fit(data, PredictorModule(network, learning_rate=0.02), out, settings)


def test_bfloat16_trains_and_float32_is_exported(trace, tmp_path, autocast):
    result = fit_in_half(COPY, TraceData(trace, batch_tokens=256), tmp_path / "b")
    assert autocast
    assert all(autocast)
    baselines = result["metrics"]["baselines"]
    assert result["metrics"]["recall_at_k"] > baselines["popularity"] + 0.05
    bundle = Bundle.open(tmp_path / "b")
    assert bundle.card["parity"]["max_abs_diff"] <= 1e-4
    kinds = {value.dtype for value in load_file(tmp_path / "b" / "weights.safetensors").values()}
    assert kinds <= {np.dtype("float32"), np.dtype("int64"), np.dtype("bool")}


def test_a_recurrence_trains_in_bfloat16_and_is_handed_on_in_float32(trace, tmp_path, autocast, no_export):
    data = TraceData(trace, batch_tokens=256)
    fit_in_half(SRU, data, tmp_path / "b")
    assert autocast
    assert all(autocast)
    (module,) = no_export
    popularity = Popularity(module.network.spec).fit(data.fitting_rows)
    least = measure(popularity, data.rows["validation"]).recall(own_k(popularity))
    assert float(module.trainer.callback_metrics["validation_recall"]) > least + 0.05
    assert {value.dtype for value in module.network.parameters()} == {torch.float32}
