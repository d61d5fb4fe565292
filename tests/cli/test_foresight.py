"""`foregate simulate --predictor`: `predicted` beside LRU and the optimum, on sequences that are new to it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from foregate.cli.main import main
from foregate.collect.topology import MoeTopology
from foregate.collect.trace import SequenceRouting, TraceHeader
from foregate.collect.writer import TraceWriter
from foregate.predictors.base import PredictorSpec
from foregate.predictors.bundle import load_predictor
from foregate.predictors.bundle_writer import write_bundle
from foregate.predictors.rows import statistics
from foregate.predictors.sru_attention import SruAttentionSettings
from foregate.runtime.policies.registry import POLICIES
from foregate.runtime.simulation import recovered_share_of

TOPOLOGY = MoeTopology.uniform(3, 8, 2)
Build = Callable[..., str]


def drawn(count: int, first: int = 0) -> list[SequenceRouting]:
    """Draw sequences whose experts follow the token and the sequence."""
    table = np.random.default_rng(1).normal(size=(20, 3, 8))
    rows = []
    for index in range(first, first + count):
        random = np.random.default_rng(index)
        ids = random.integers(0, 20, 30)
        scores = 2 * table[ids] + random.normal(size=(3, 8)) + 0.3 * random.normal(size=(30, 3, 8))
        experts = np.argsort(-scores, axis=-1)[..., :2].reshape(30, -1).astype(np.int16)
        rows.append(
            SequenceRouting(sequence=str(index), experts=experts, token_ids=ids.astype(np.int32), prompt_tokens=4)
        )
    return rows


@pytest.fixture(scope="module")
def trace_of(tmp_path_factory: pytest.TempPathFactory) -> Build:
    """Write rows as a trace."""

    def build(rows: list[SequenceRouting], topology: MoeTopology = TOPOLOGY) -> str:
        path = tmp_path_factory.mktemp("traces") / "trace"
        with TraceWriter(path, TraceHeader(topology=topology)) as writer:
            for row in rows:
                writer.write(row)
        return str(path)

    return build


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Give a bundle at its warm start, which saw the first four sequences."""
    torch.manual_seed(0)
    seen = drawn(4)
    spec = PredictorSpec(family="sru_attention", horizon="token", topology=TOPOLOGY, stack="causal", vocab_size=20)
    found = statistics(seen, TOPOLOGY, 8)
    sizes = SruAttentionSettings(embedding=8, hidden=16, attention=4, window=4, discount=0.8)
    network = sizes.build(spec, found.token_ids)
    network.warm_start(found)
    path: Path = tmp_path_factory.mktemp("bundles") / "bundle"
    write_bundle(path, network, trained_on=seen)
    return str(path)


def simulated(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    assert main(["simulate", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["simulate", *arguments]) in (1, 2)
    out, err = capsys.readouterr()
    assert out == ""
    return next(line for line in err.splitlines() if line.startswith("foregate simulate: "))


def test_unseen_sequences_alone_are_replayed(bundle: str, trace_of: Build, capsys: pytest.CaptureFixture[str]) -> None:
    path = trace_of(drawn(10))
    told = ("--predictor", bundle, "--policies", "lru,predicted,belady", "--capacity", "6,12")
    reports = simulated(capsys, path, *told)
    for report in reports:
        assert (report["sequences"], report["left_out"], report["predictor"]) == (6, 4, bundle)
        rows = report["policies"]
        wanted = recovered_share_of(load_predictor(bundle), drawn(6, 4), TOPOLOGY, report["capacity"])
        assert {name: row["misses"] for name, row in rows.items()} == {n: r.misses for n, r in wanted.items()}
        assert rows["predicted"]["recovered_share"] == wanted["predicted"].recovered_share
    few = simulated(capsys, path, *told, "--sequences", "2")[0]
    assert (few["sequences"], few["left_out"], few["tokens"]) == (2, 4, 60)
    new = simulated(capsys, trace_of(drawn(3, 20)), *told, "--as", "recorded")[0]
    assert (new["sequences"], new["left_out"], new["events"]) == (3, 0, 3 * 3 * (1 + 26))


def test_with_a_predictor_every_policy_is_replayed(
    bundle: str, trace_of: Build, capsys: pytest.CaptureFixture[str]
) -> None:
    path = trace_of(drawn(6))
    assert list(simulated(capsys, path, "--predictor", bundle)["policies"]) == list(POLICIES)
    without = simulated(capsys, path)
    assert (without["predictor"], without["left_out"]) == (None, 0)
    assert "predicted" not in without["policies"]
    assert main(["simulate", path, "--predictor", bundle, "--capacity", "0.25"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert f"predicted follows {bundle}; 4 sequences of the trace are left out, since its training saw them." in out


def test_what_makes_no_sense_is_refused(bundle: str, trace_of: Build, capsys: pytest.CaptureFixture[str]) -> None:
    path = trace_of(drawn(6))
    assert "saw every sequence of" in refused(capsys, trace_of(drawn(3)), "--predictor", bundle)
    assert "is replayed as decode or recorded, got prefill" in refused(
        capsys, path, "--predictor", bundle, "--as", "prefill"
    )
    assert "add predicted to --policies" in refused(capsys, path, "--predictor", bundle, "--policies", "lru")
    assert "foregate simulate --predictor BUNDLE makes them" in refused(capsys, path, "--policies", "predicted")
    assert "written by foregate train" in refused(capsys, path, "--predictor", path)
    other = MoeTopology.uniform(2, 8, 2)
    rows = [SequenceRouting(sequence="0", experts=np.tile(np.arange(4, dtype=np.int16), (3, 1)))]
    assert "but this model has" in refused(capsys, trace_of(rows, other), "--predictor", bundle)
