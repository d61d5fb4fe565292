"""The predictor that `foregate bench replay` trains where none is named."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from foregate.cli.replay_predictor import with_predictor
from foregate.predictors.bundle import Bundle
from foregate.runtime.bench.replay import ReplayBench


def test_it_is_trained_on_the_first_sequences_and_goes_again(tmp_path, monkeypatch):
    monkeypatch.setenv("FOREGATE_SMOKE", "1")
    rng = np.random.default_rng(0)
    experts = np.stack([rng.permutation(8)[:2] for _ in range(10 * 16 * 2)]).reshape(160, 2, 2).astype(np.uint8)
    trace = tmp_path / "t.npz"
    ids = rng.integers(0, 9, 160).astype(np.int32)
    np.savez(trace, experts=experts, offsets=np.arange(11) * 16, token_ids=ids)
    with with_predictor(ReplayBench(trace=str(trace))) as complete:
        assert complete.predictor is not None
        bundle = Bundle.open(complete.predictor)
        assert len(bundle.training_sequences()) == 8
        assert bundle.card["training"]["split"]["order"] == "file"
    assert not Path(complete.predictor).exists()


def test_a_named_one_stays(tmp_path):
    given = ReplayBench(trace=str(tmp_path / "t.npz"), predictor="somewhere")
    with with_predictor(given) as complete:
        assert complete is given
