"""`foregate bench epoch`: arms in turns, one ratio per round, the same batches for both, and steps that train."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from foregate.cli.main import main
from foregate.collect.errors import DataError, SettingError
from foregate.collect.topology import MoeLayer, MoeTopology
from foregate.collect.trace import SequenceRouting, TraceHeader
from foregate.collect.writer import TraceWriter
from foregate.train.bench import epoch
from foregate.train.bench.epoch import EpochBench, bench, describe

TINY = {"hidden": 8, "num_layers": 1, "batch_size": 4, "batches": 2}


def test_arms_take_turns_and_each_round_gives_one_ratio(monkeypatch):
    clock, order = [0.0], []
    # seconds of each epoch: warm-up, then three rounds; the machine becomes ten times slower in the last
    took = {"sru": iter([7.0, 1.0, 1.2, 9.0]), "lstm": iter([9.0, 2.0, 2.0, 20.0])}

    def run(arm) -> None:
        name = "sru" if arm.network.spec.family == "sru_attention" else "lstm"
        order.append(name)
        clock[0] += next(took[name])

    monkeypatch.setattr(epoch._Arm, "epoch", run)
    result = bench(EpochBench(rounds=3, **TINY), {"cpu": "made-up"}, lambda: clock[0])
    assert order == ["lstm", "sru", "sru", "lstm", "lstm", "sru", "sru", "lstm"]
    assert result["ratio"] == pytest.approx(0.5)  # of 0.5, 0.6 and 0.45
    assert result["arms"]["sru"]["s_per_epoch"] == pytest.approx(1.2)
    assert result["arms"]["lstm"]["s_per_epoch_spread"] == pytest.approx([2, 20])
    assert result["machine"] == {"cpu": "made-up"}
    assert "sru / lstm 0.500" in describe(result)
    assert result["sequences"] == 8


def test_both_arms_learn_from_the_same_batches():
    settings = EpochBench(**{**TINY, "hidden": 16})
    batches, topology = epoch._drawn(settings)
    for batch in batches:
        lengths = batch.mask.sum(1)
        assert (batch.ids[~batch.mask] == -1).all()
        assert (batch.experts[~batch.mask] == -1).all()
        assert ((batch.experts >= 0) & (batch.experts < 32))[batch.mask].all()
        assert int(lengths.min()) >= 2
    torch.manual_seed(0)
    for family in (epoch.SruAttentionSettings, epoch.LstmSparsemaxSettings):
        arm = epoch._Arm(family(hidden=16, num_layers=1, link="softmax"), topology, "encoder", batches)
        first = float(arm._step(batches[0]))
        for _ in range(15):
            arm.epoch()
        assert float(arm._step(batches[0])) < first - 0.1


def test_a_drawn_epoch_is_as_long_as_its_phrases():
    batches, _ = epoch._drawn(EpochBench(batch_size=64, batches=50))
    lengths = torch.cat([batch.mask.sum(1) for batch in batches]).double()
    assert float(lengths.median()) == pytest.approx(9, abs=1)
    assert float(lengths.mean()) == pytest.approx(12, abs=1)


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    """Write 30 encoder sequences."""
    topology = MoeTopology(layers=(MoeLayer(stack="encoder", block=1, num_experts=6, top_k=1),))
    path, rng = tmp_path_factory.mktemp("epoch") / "trace", np.random.default_rng(0)
    with TraceWriter(path, TraceHeader(topology=topology, vocab_size=9)) as writer:
        for index in range(30):
            ids = rng.integers(0, 9, rng.integers(3, 9)).astype(np.int32)
            experts = (ids % 6)[:, None].astype(np.int16)
            writer.write(SequenceRouting(sequence=str(index), stack="encoder", token_ids=ids, experts=experts))
    return path


def test_the_command_prints_arms_ratio_and_machine(trace, capsys, monkeypatch):
    monkeypatch.setenv("FOREGATE_SMOKE", "1")
    words = ["bench", "epoch", "--trace", str(trace), "--hidden", "8", "--batch-size", "5"]
    assert main([*words, "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert set(value["arms"]) == {"sru", "lstm"}
    assert value["sequences"] == 10
    assert {"ratio", "ratio_spread", "cpu_ratio", "tokens"} <= set(value)
    assert value["machine"]["cores"] >= 1
    assert main(words) == 0
    assert "in CPU time" in capsys.readouterr().out


def test_what_cannot_be_measured_is_refused(trace):
    with pytest.raises(SettingError, match="rounds must be at least 1, got 0"):
        EpochBench(rounds=0)
    with pytest.raises(SettingError, match=r"stack must be encoder or decoder.*got 'causal'"):
        EpochBench(stack="causal")
    with pytest.raises(SettingError, match="hidden must be even"):
        bench(EpochBench(**{**TINY, "hidden": 7}), {})
    with pytest.raises(DataError, match="has no stack 'decoder'"):
        bench(EpochBench(trace=str(trace), stack="decoder", **TINY), {})
    assert torch.get_num_threads() >= 1
