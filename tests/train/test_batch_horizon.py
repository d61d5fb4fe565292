"""Encoders and decoders: predicted a batch ahead from all ids, out of a folder trace with two stacks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from foregate.collect.topology import MoeLayer, MoeTopology
from foregate.collect.trace import SequenceRouting, TraceHeader
from foregate.collect.writer import TraceWriter
from foregate.predictors.sru_attention import SruAttentionSettings
from foregate.train import fit as fit_file
from foregate.train.data import TraceData
from foregate.train.evaluate import evaluate
from foregate.train.fit import FitSettings, fit
from foregate.train.module import PredictorModule

SETTINGS = SruAttentionSettings(embedding=8, hidden=32, attention=8, link="softmax", dropout=0.0, forget=0.0)
LIMITS = FitSettings(max_steps=60, validate_steps=30, max_epochs=1000)
VOCAB = 8


@pytest.fixture(scope="module")
def two_stacks(tmp_path_factory):
    """One expert per token, told by the next token, so that only who reads ahead can know it; a tenth dropped."""
    layers = [MoeLayer(stack=stack, block=1, num_experts=6, top_k=1) for stack in ("encoder", "decoder")]
    header = TraceHeader(topology=MoeTopology(layers=tuple(layers)), vocab_size=VOCAB, model_fingerprint="abc")
    path = tmp_path_factory.mktemp("stacks") / "trace"
    rng = np.random.default_rng(0)
    with TraceWriter(path, header) as writer:
        for index in range(60):
            rows = []
            for stack in ("encoder", "decoder"):
                ids = rng.integers(0, VOCAB, rng.integers(5, 20)).astype(np.int32)
                after = np.append(ids[1:], 0)
                experts = np.where(rng.random(len(ids)) < 0.1, -1, after % 6)[:, None].astype(np.int16)
                rows.append(SequenceRouting(sequence=str(index), stack=stack, token_ids=ids, experts=experts))
            writer.write(*rows)
    return path


def data_and_module(trace, stack: str) -> tuple[TraceData, PredictorModule]:
    torch.set_num_threads(1)
    return TraceData(trace, stack=stack, batch_tokens=256), PredictorModule(SETTINGS, learning_rate=0.02)


def test_an_encoder_reads_ahead(two_stacks, tmp_path):
    result = fit(*data_and_module(two_stacks, "encoder"), tmp_path / "bundle", LIMITS)
    metrics = result["metrics"]
    assert result["horizon"] == "batch"
    assert set(metrics["baselines"]) == {"random", "popularity", "token_table"}
    assert {"1", "2", "3"} <= set(metrics["recall_at"])
    assert metrics["recall_at_k"] > 0.8 > max(metrics["baselines"].values()) + 0.3
    report = evaluate(tmp_path / "bundle", two_stacks)
    assert set(report["horizons"]) == {"batch"}
    assert report["recall_at_k"] == pytest.approx(metrics["recall_at_k"], abs=1e-4)


def test_a_decoder_does_not(two_stacks, tmp_path, monkeypatch):
    kept: list[PredictorModule] = []

    class _Exported:
        card: dict = {"metrics": {}, "latency_ms": {}}  # noqa: RUF012

        def __init__(self, module: PredictorModule) -> None:
            kept.append(module)
            self.spec = module.network.spec
            self.path = None

    monkeypatch.setattr(fit_file, "export", lambda module, *args: _Exported(module))
    data, module = data_and_module(two_stacks, "decoder")
    fit(data, module, tmp_path / "bundle", LIMITS)
    network = kept[0].network.eval()
    hits = []
    with torch.no_grad():
        for batch in data.val_dataloader():
            logits, used = kept[0]._predict(batch, stride=1)[:2]
            counted = used.any(-1)
            hits.append((logits.argmax(-1) == used.argmax(-1))[counted].float())
    assert network.spec.stack == "decoder"
    assert torch.cat(hits).mean() < 0.6
