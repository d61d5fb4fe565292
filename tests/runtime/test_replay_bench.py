"""The replay benchmark: every arm computes the same, the optimum reads least, and what it refuses."""

from __future__ import annotations

import numpy as np
import pytest
from foregate.collect.errors import DataError, SettingError
from foregate.collect.topology import MoeTopology
from foregate.predictors.bundle import Bundle
from foregate.runtime.bench.replay import ReplayBench, bench, describe
from foregate.runtime.bench.replay_arm import Foreknown, Token, needed_of
from foregate.runtime.bench.replay_blocks import ReplayBlocks
from foregate.runtime.bench.replay_tokens import FREE
from foregate.runtime.policies.registry import POLICIES
from foregate.train.fit import train


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    """16 sequences of 24 tokens, 3 layers of 8 experts, top-2, told by the token."""
    rng = np.random.default_rng(0)
    table = np.stack([rng.permutation(8)[:2] for _ in range(3 * 20)]).reshape(20, 3, 2)
    ids = rng.integers(0, 20, 16 * 24)
    path = tmp_path_factory.mktemp("replay") / "t.npz"
    experts = table[ids].astype(np.uint8)
    np.savez(path, experts=experts, offsets=np.arange(17) * 24, token_ids=ids.astype(np.int32))
    return path


@pytest.fixture(scope="module")
def bundle(trace, tmp_path_factory):
    out = tmp_path_factory.mktemp("bundle") / "bundle"
    train(trace, out, max_steps=4)
    return Bundle.open(out)


def settings(trace, bundle, tmp_path, **others) -> ReplayBench:
    given = {"tokens": 12, "rounds": 2, "warmup": 6, "slots": 0.4, "block_mib": 0.25, "threads": 1}
    folder = str(tmp_path / "experts")
    return ReplayBench(**(given | {"trace": str(trace), "predictor": str(bundle.path), "folder": folder} | others))


def test_all_arms_compute_the_same(trace, bundle, tmp_path):
    result = bench(settings(trace, bundle, tmp_path))
    arms = result["arms"]
    assert result["identical"]
    assert list(arms) == ["resident", "held", "lru", "no_predictor", "foregate", "oracle"]
    assert (result["slots"], result["experts"]) == (9, 24)
    assert result["free_policy"] in FREE
    accesses = 2 * 12 * 3 * 2
    for name, arm in arms.items():
        if name == "resident":
            continue
        served = arm["hits"] + arm["delayed_hits"] + arm["misses"]
        assert served == accesses, name
    assert arms["held"]["misses"] == arms["held"]["mib_per_token"] == 0
    assert arms["lru"]["prefetches"] == 0
    assert arms["lru"]["mib_per_token"] == pytest.approx(arms["lru"]["misses"] * 0.25 / 24, rel=0.05)
    assert arms["oracle"]["mib_per_token"] < arms["lru"]["mib_per_token"]
    assert arms["oracle"]["wasted"] == 0
    assert not list((tmp_path / "experts").iterdir()), "the experts' file is gone"
    text = describe(result)
    assert "foregate / lru" in text
    assert "identical in all arms" in text


def test_the_future_is_told_token_by_token():
    topology = MoeTopology.uniform(2, 4, 2)
    tokens = [Token(1, np.array([[0, 3], [1, -1]]), True), Token(2, np.array([[2, 2], [0, 1]]), False)]
    assert needed_of(tokens[0], topology) == [(0, 3), (5,)]
    assert needed_of(tokens[1], topology) == [(2,), (4, 5)]
    told = Foreknown(topology, tokens)
    for index, wanted in enumerate([[0, 3, 5], [2, 4, 5]]):
        told.begin("causal", None, None, index == 0)
        forecast = told.routed(0, tokens[index].experts[:1])
        assert forecast is not None
        assert np.flatnonzero(forecast.demand).tolist() == wanted
        assert forecast.step == index


def test_blocks_have_the_size_that_was_asked_for(tmp_path):
    blocks = ReplayBlocks(tmp_path / "b", MoeTopology.uniform(2, 3, 1), 4 << 20)
    assert blocks.block_bytes == 4 << 20
    assert 0.99 < blocks.layout.payload_bytes / blocks.block_bytes <= 1
    blocks.write()
    assert blocks.files[0].stat().st_size == 6 * (4 << 20)
    with pytest.raises(SettingError, match="64 hidden units"):
        ReplayBlocks(tmp_path / "b", MoeTopology.uniform(2, 3, 1), 4096)


def test_a_full_disk_is_said_before_anything_is_written(tmp_path, monkeypatch):
    blocks = ReplayBlocks(tmp_path / "b", MoeTopology.uniform(2, 3, 1), 1 << 20)
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 1 << 20}))
    with pytest.raises(SettingError, match="GiB left"):
        blocks.write()
    assert not (tmp_path / "b").exists()


def test_what_is_refused(trace, bundle, tmp_path):
    with pytest.raises(SettingError, match="predictor must be a bundle"):
        bench(settings(trace, bundle, tmp_path, predictor=None))
    with pytest.raises(DataError, match="There is no trace"):
        bench(settings(tmp_path / "none.npz", bundle, tmp_path))
    with pytest.raises(DataError, match="fewer --tokens or --rounds"):
        bench(settings(trace, bundle, tmp_path, tokens=1000))
    for wrong in ({"tokens": 0}, {"rounds": 0}, {"threads": 0}, {"warmup": -1}, {"slots": 1.0}, {"block_mib": 0.0}):
        with pytest.raises(SettingError, match=next(iter(wrong))):
            settings(trace, bundle, tmp_path, **wrong)


def test_free_policies_are_policies():
    assert set(FREE) <= set(POLICIES) - {"belady", "predicted"}
