"""Half precision trains as well, and the bundle is in single precision."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from foregate.predictors.bundle import Bundle
from foregate.predictors.copy_attention import CopyAttentionSettings
from foregate.predictors.sru_attention import SruAttentionSettings
from foregate.train.data import TraceData
from foregate.train.fit import FitSettings, fit
from foregate.train.module import PredictorModule
from safetensors.numpy import load_file

SRU = SruAttentionSettings(embedding=8, hidden=16, attention=8, window=8, discount=0.5)
COPY = CopyAttentionSettings(embedding=8, hidden=16, heads=2, attention=8, window=8)


@pytest.mark.parametrize("network", [SRU, COPY], ids=lambda network: network.family)
def test_bfloat16_trains_and_float32_is_exported(network, trace, tmp_path, monkeypatch):
    seen = []
    losses = PredictorModule._losses

    def noted(self, batch, found):
        seen.append(torch.is_autocast_enabled("cpu"))
        return losses(self, batch, found)

    monkeypatch.setattr(PredictorModule, "_losses", noted)
    settings = FitSettings(max_steps=30, validate_steps=15, max_epochs=1000, precision="bf16-mixed")
    data = TraceData(trace, batch_tokens=256)
    result = fit(data, PredictorModule(network, learning_rate=0.02), tmp_path / "b", settings)
    assert all(seen)
    baselines = result["metrics"]["baselines"]
    assert result["metrics"]["recall_at_k"] > baselines["popularity"] + 0.05
    bundle = Bundle.open(tmp_path / "b")
    assert bundle.card["parity"]["max_abs_diff"] <= 1e-4
    kinds = {value.dtype for value in load_file(tmp_path / "b" / "weights.safetensors").values()}
    assert kinds <= {np.dtype("float32"), np.dtype("int64"), np.dtype("bool")}
