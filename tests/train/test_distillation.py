"""Learning from the router's own scores: the loss by its definition, the batches that carry them, and doing without."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
import torch
from foregate.collect.errors import DataError, SettingError
from foregate.collect.topology import MoeLayer, MoeTopology
from foregate.collect.trace import SequenceRouting, Trace, TraceHeader
from foregate.collect.writer import TraceWriter
from foregate.predictors.sru_attention import SruAttentionSettings
from foregate.train import fit as fit_file
from foregate.train.data import Chunks, TraceData, dense_scores
from foregate.train.fit import FitSettings, fit
from foregate.train.losses import distill_loss, distillation
from foregate.train.module import PredictorModule

SIZES = (6, 4)  # experts per layer


@dataclass(frozen=True, kw_only=True)
class Distilled(SruAttentionSettings):
    """The SRU predictor, which also learns from scores."""

    family: ClassVar[str] = "sru_attention"

    distill_top: int = 3
    distill_weight: float = 2.0


SMALL = Distilled(embedding=8, hidden=16, attention=8, window=8, dropout=0.0, forget=0.0)


def slow_loss(logits, scores, sizes, scored, top) -> float:
    """Compare token by token, layer by layer."""
    total, count = 0.0, 0
    for b, t in np.argwhere(scored.numpy()):
        count += 1
        for layer, size in enumerate(sizes):
            teacher = scores[b, t, layer, :size].tolist()
            student = logits[b, t, layer, :size].tolist()
            if min(teacher) >= 0 and abs(sum(teacher) - 1) < 1e-3:
                teacher = [math.log(max(share, 1e-12)) for share in teacher]
            best = sorted(range(size), key=lambda e: -teacher[e])[:top]
            shares = [[math.exp(values[e]) for e in best] for values in (teacher, student)]
            wanted, found = ([value / sum(row) for value in row] for row in shares)
            total += sum(abs(a - b) for a, b in zip(wanted, found, strict=True)) / len(sizes)
    return total / count


@pytest.mark.parametrize("top", [1, 3, 5, 30])
@pytest.mark.parametrize("shares", [False, True])
def test_the_loss_by_its_definition(top, shares):
    torch.manual_seed(top)
    scores, logits = torch.randn(2, 5, 2, 6), torch.randn(2, 5, 2, 6)
    exists = torch.arange(6)[None] < torch.tensor(SIZES)[:, None]
    if shares:
        scores = scores.masked_fill(~exists, -torch.inf).softmax(-1)
    scored = torch.ones(2, 5, dtype=torch.bool)
    scored[1, 2:] = False
    found = distill_loss(logits, scores, exists, scored, top)
    assert found.item() == pytest.approx(slow_loss(logits, scores, SIZES, scored, top), abs=1e-6)
    other = logits.clone()
    other[1, 2:], other[:, :, 1, 4:] = 9, 5
    torch.testing.assert_close(distill_loss(other, scores, exists, scored, top), found)


def test_a_student_that_repeats_its_teacher_loses_nothing_and_gradients_are_finite():
    scores = torch.tensor([[[[3.0, -torch.inf, 1.0, 0.5]]]])
    exists, scored = torch.ones(1, 4, dtype=torch.bool), torch.ones(1, 1, dtype=torch.bool)
    logits = torch.tensor([[[[3.0, -60.0, 1.0, 0.5]]]], requires_grad=True)
    loss = distill_loss(logits, scores, exists, scored, 4)
    assert loss.item() == pytest.approx(0, abs=1e-6)
    loss = distill_loss(logits * 2, scores, exists, scored, 4)
    loss.backward()
    assert loss.item() > 0.01
    assert logits.grad is not None
    assert torch.isfinite(logits.grad).all()


def test_settings_name_the_loss():
    assert distillation(SruAttentionSettings()) is None
    assert distillation(Distilled(distill_top=30)) == (30, 2.0)
    assert distillation(Distilled(distill_top=0)) is None
    with pytest.raises(SettingError, match="distill_weight must not be negative, got -1"):
        distillation(Distilled(distill_weight=-1))


def write(path, *, scores: bool, spoil=None):
    """Write 2 layers of 6 and 4 experts whose router is a table of scores by token."""
    layers = [MoeLayer(stack="causal", block=b, num_experts=size, top_k=2) for b, size in enumerate(SIZES)]
    kind = {"scores": "selection"} if scores else {}
    header = TraceHeader(topology=MoeTopology(layers=tuple(layers)), vocab_size=20, **kind)  # pyright: ignore
    rng = np.random.default_rng(0)
    table = rng.normal(size=(20, sum(SIZES))).astype(np.float32)
    with TraceWriter(path, header) as writer:
        for index in range(12):
            ids = rng.integers(0, 20, rng.integers(8, 20)).astype(np.int32)
            given = table[ids] + rng.normal(size=(len(ids), sum(SIZES))).astype(np.float32)
            halves = np.split(given, [SIZES[0]], axis=1)
            experts = np.concatenate([np.argsort(-half, axis=1)[:, :2] for half in halves], axis=1)
            if spoil is not None:
                given = spoil(given)
            row = SequenceRouting(sequence=str(index), token_ids=ids, experts=experts.astype(np.int16))
            writer.write(row if not scores else SequenceRouting(**_fields(row), scores=given))
    return path


def _fields(row: SequenceRouting) -> dict:
    return {"sequence": row.sequence, "token_ids": row.token_ids, "experts": row.experts}


def test_batches_show_the_scores_as_they_were_recorded(tmp_path):
    data = TraceData(write(tmp_path / "t", scores=True), chunk_tokens=5, context_tokens=2)
    data.with_scores = True
    rows = {row.sequence: row for row in Trace.open(tmp_path / "t").sequences("causal")}
    chunks = Chunks(data.fitting_rows, 5, 2, scores=True)
    for index, (row, start, stop, _) in enumerate(chunks.chunks.tolist()):
        batch = chunks.collate([chunks[index], chunks[0]])
        recorded = rows[data.fitting_rows[row].sequence].scores
        assert recorded is not None
        assert batch.scores is not None
        found = batch.scores[0, : stop - start].numpy()
        np.testing.assert_array_equal(found[:, 0], recorded[start:stop, :6])
        np.testing.assert_array_equal(found[:, 1, :4], recorded[start:stop, 6:])
        assert (found[:, 1, 4:] == 0).all()
        assert (batch.scores[~batch.mask] == 0).all()
    assert all(batch.scores is not None for batch in data.train_dataloader())
    data.with_scores = False
    assert all(batch.scores is None for batch in data.train_dataloader())


def test_scores_that_are_missing_or_no_numbers_are_refused(tmp_path):
    topology = TraceData(write(tmp_path / "t", scores=True)).header.topology
    row = next(iter(Trace.open(tmp_path / "t")))
    with pytest.raises(DataError, match=r"Sequence '0' has no router scores.*record the trace again"):
        dense_scores(SequenceRouting(**_fields(row)), topology)
    spoiled = np.array(row.scores)
    spoiled[3, 1] = np.nan
    with pytest.raises(DataError, match=r"sequence '0' are no numbers at token 3"):
        dense_scores(SequenceRouting(**_fields(row), scores=spoiled), topology)


@pytest.mark.parametrize("scores", [True, False])
def test_a_family_distils_where_it_can_and_says_so_where_not(scores, tmp_path, monkeypatch, caplog):
    runs, losses = [], []

    class _Exported:
        card: ClassVar[dict] = {"metrics": {}, "latency_ms": {}}

        def __init__(self, module: PredictorModule) -> None:
            self.spec, self.path = module.network.spec, None

    def export(module, data, out, run):
        runs.append(run)
        return _Exported(module)

    seen = PredictorModule._losses

    def noted(self, batch, found):
        losses.append(seen(self, batch, found))
        return losses[-1]

    monkeypatch.setattr(fit_file, "export", export)
    monkeypatch.setattr(PredictorModule, "_losses", noted)
    data = TraceData(write(tmp_path / "t", scores=scores))
    with caplog.at_level(logging.WARNING):
        fit(data, PredictorModule(SMALL), tmp_path / "b", FitSettings(max_steps=2, validate_steps=2))
    assert runs[0]["distilled"] is scores
    assert ("without distillation; record the trace with --scores" in caplog.text) is not scores
    assert all(("distill" in found) is scores for found in losses)
