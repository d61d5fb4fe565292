"""Several processes train one predictor: batches are dealt out, numbers are added up, one of them writes."""

from __future__ import annotations

import json
import os
import sys

import numpy as np
import pytest
from foregate.collect.errors import DataError
from foregate.predictors.bundle import Bundle
from foregate.train.sampler import LengthSampler

SIZES = {"embedding": 8, "hidden": 16, "attention": 8, "window": 8}
NETWORK = "foregate.predictors.sru_attention.SruAttentionSettings"
RUN = ["--tracker", "csv", "--fit.max_steps", "24", "--fit.validate_steps", "12", "--model.learning_rate", "0.02"]


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("stretches", [1, 8])
def test_batches_are_dealt_out_without_overlap(world, stretches):
    lengths = np.random.default_rng(0).integers(2, 33, 200)
    places = np.sort(np.random.default_rng(1).integers(0, stretches, 200))
    for epoch in range(4):
        ranks = []
        for rank in range(world):
            sampler = LengthSampler(lengths, 64, 0, stretches=places, block=3, rank=rank, world=world)
            sampler.set_epoch(epoch)
            ranks.append(list(sampler))
            assert len(ranks[-1]) == len(sampler)
        assert len({len(batches) for batches in ranks}) == 1
        assert sorted(n for batches in ranks for batch in batches for n in batch) == list(range(200))


def test_validation_is_dealt_out_too_and_nobody_goes_without():
    lengths = np.arange(2, 12)
    dealt = [list(LengthSampler(lengths, 24, None, rank=rank, world=2)) for rank in (0, 1)]
    assert sorted(n for batches in dealt for batch in batches for n in batch) == list(range(10))
    few = [list(LengthSampler(lengths, 1000, None, rank=rank, world=2)) for rank in (0, 1)]
    assert few[0] == few[1] == [list(range(9, -1, -1))]


def test_an_odd_number_of_pieces_is_shared_and_too_few_are_refused():
    ranks = [LengthSampler(np.full(5, 10), 10, 0, rank=rank, world=2) for rank in (0, 1)]
    assert [len(list(sampler)) for sampler in ranks] == [2, 2]
    assert sorted(n for sampler in ranks for batch in sampler for n in batch) == list(range(5))
    with pytest.raises(DataError, match="3 processes cannot share 2 pieces of training sequences"):
        LengthSampler(np.array([4, 4]), 64, 0, world=3)


@pytest.fixture
def torchrun(fork, tmp_path):
    """Run `foregate train` in two processes."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    flags = [word for name, value in SIZES.items() for word in (f"--model.network.{name}", str(value))]
    given = ["-m", "foregate.cli", "train", "--model.network", NETWORK, *flags, *RUN]
    return lambda *words: fork.run(*given, *words, cwd=tmp_path, env=environment, ranks=2)


@pytest.mark.skipif(sys.platform == "win32", reason="gloo")
def test_two_processes_train_one_predictor(trace, tmp_path, torchrun):
    done = torchrun("--trace", str(trace), "--out", "b", "--data.batch_tokens", "128", "--json")
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout)  # one of them printed
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b", "b.run"]
    assert {path.name for path in (tmp_path / "b.run").glob("*.ckpt")} == {"best.ckpt", "last.ckpt"}
    assert len(list((tmp_path / "b.run").rglob("metrics.csv"))) == 1
    assert result["steps"] == 24
    assert Bundle.open(tmp_path / "b").card["training"]["steps"] == 24
    # half as large batches in two processes are about one process with whole ones
    assert result["metrics"]["recall_at_k"] > result["metrics"]["baselines"]["popularity"] + 0.15


@pytest.mark.skipif(sys.platform == "win32", reason="gloo")
def test_what_is_wrong_for_all_processes_is_said_and_ends_them(tmp_path, torchrun):
    done = torchrun("--trace", "nowhere", "--out", "b")
    assert done.returncode == 1
    assert "foregate train: nowhere is no routing trace" in done.stderr
    assert list(tmp_path.iterdir()) == []
