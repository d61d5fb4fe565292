"""A family without gradients through all of training: it learns, is exported, and comes back from a checkpoint."""

from __future__ import annotations

import numpy as np
from foregate.predictors.eam import EamNetwork, EamSettings
from foregate.predictors.eam_online import OnlineEam
from foregate.train.data import TraceData
from foregate.train.fit import LAST, FitSettings, fit
from foregate.train.module import PredictorModule


def test_learns_without_steps(tmp_path, write):
    trace = write(tmp_path / "trace.npz", sequences=60)
    settings = EamSettings(capacity=12, reach=1)
    result = fit(
        TraceData(trace),
        PredictorModule(settings),
        tmp_path / "bundle",
        FitSettings(accelerator="cpu"),
        run_dir=tmp_path / "run",
    )
    assert (result["family"], result["horizon"], result["steps"]) == ("eam", "layer", 0)
    metrics = result["metrics"]
    assert metrics["recall_at_k"] > metrics["baselines"]["popularity"]
    first = OnlineEam.of_bundle(tmp_path / "bundle")
    assert 6 < len(first.collection) <= 12  # the 40-odd training sequences were clustered
    module = PredictorModule.load(tmp_path / "run" / LAST)
    assert isinstance(module.network, EamNetwork)
    kept = module.network.collection_CLE[module.network.present_C].numpy()  # what another export would write
    np.testing.assert_allclose(kept, first.collection, rtol=1e-6)
