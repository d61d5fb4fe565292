"""Training by token texts: what stands beside a trace is taken, and ids that were not seen get an embedding."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
from foregate.collect.errors import DataError
from foregate.predictors.base import Step
from foregate.predictors.bundle import load_predictor
from foregate.predictors.sru_attention import SruAttentionSettings
from foregate.train.data import TraceData
from foregate.train.fit import train

SMALL = SruAttentionSettings(embedding=8, hidden=16, attention=4, window=4, num_layers=1)


@pytest.fixture
def spelt_trace(trace: Path, tmp_path: Path) -> Path:
    """Give a trace that has even ids alone, with the texts of all ids beside it, and of more."""
    path = tmp_path / "spelt.npz"
    arrays = dict(np.load(trace))
    np.savez(path, **arrays | {"token_ids": 2 * arrays["token_ids"]})
    texts = [f" {'ab' if i % 4 < 2 else 'cd'}{i}" for i in range(600)]
    with gzip.open(tmp_path / "spelt.vocab.json.gz", "wt") as file:
        json.dump(texts, file)
    return path


def test_unseen_ids_are_told_apart_by_their_texts(spelt_trace, tmp_path):
    data = TraceData(spelt_trace)
    assert data.texts is not None
    assert len(data.texts) == data.vocab_size, "what no id of the trace can be is left out"
    train(spelt_trace, tmp_path / "bundle", max_steps=2, network=SMALL)
    predictor = load_predictor(tmp_path / "bundle")
    ids = np.array([1, 5, 3, 7, -1, 5000])  # never seen, spelt by two stems; and what is known by nothing
    previous = np.zeros((len(ids), *predictor.spec.shape), np.float32)
    given = predictor.step(Step(ids, previous), predictor.start(len(ids)))[0].routing
    np.testing.assert_array_equal(given[4], given[5])
    assert min(np.abs(given[i] - given[4]).max() for i in range(4)) > 1e-5


def test_texts_can_be_named_and_must_be_texts(trace, tmp_path):
    assert TraceData(trace).texts is None
    named = tmp_path / "vocab.json"
    named.write_text(json.dumps(["a", "b", "c"]))
    assert TraceData(trace, token_texts=str(named)).texts == ("a", "b", "c")
    named.write_text("3")
    with pytest.raises(DataError, match="token texts"):
        _ = TraceData(trace, token_texts=str(named)).texts
