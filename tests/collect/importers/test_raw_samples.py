"""Logs as their tools wrote them, with counts taken from the files by zcat, grep and awk, not by the importers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from foregate.collect.load_table import LoadTable
from foregate.collect.trace import Trace

Import = Callable


@pytest.fixture
def raw(shared: Path) -> Path:
    """Give the folder of raw logs."""
    return shared / "traces" / "raw"


def test_vllm_log_of_one_layer(imported: Import, raw: Path) -> None:
    # zcat | wc -l: 18,819 with the meta line; grep -c of the dummy's ids and weights: 16,384, in two forwards of 8,192;
    # grep -c '"token_idx": 0,': 106 forwards
    got = imported(raw / "vllm-jsonl")
    assert got.result.format == "vllm-jsonl"
    assert (got.result.report.rows_read, got.dropped) == (18_818, {"warm_up": 16_384})
    assert (got.result.sequences, got.result.tokens) == (106 - 2, 18_818 - 16_384)
    assert got.result.described == "1 causal layer x 60 experts, top-4"
    first, last = next(iter(got.rows.values())), list(got.rows.values())[-1]
    assert first.num_tokens == 65
    assert first.experts[:2].tolist() == [[39, 40, 46, 30], [30, 59, 13, 34]]  # lines 8,194 and 8,195
    assert first.weights is not None
    assert first.weights[0].tolist() == np.array([0.0504, 0.0381, 0.0369, 0.0358], np.float16).tolist()
    assert last.experts[-1].tolist() == [8, 5, 45, 46]
    header = Trace.open(got.result.out).header
    assert (header.model, header.seed, header.weights) == ("Qwen/Qwen1.5-MoE-A2.7B-Chat", 1234, "unit")
    assert header.versions["torch"] == "2.9.1+cu128"


def test_vllm_logs_by_layer_are_not_joined(imported: Import, raw: Path) -> None:
    # each of the 5 files: 9,000 lines with the meta line, forwards of 8,192 and 256 dummies, then 65 and 486 rows
    got = imported(raw / "vllm-jsonl-by-layer")
    assert got.result.format == "vllm-jsonl-by-layer"
    assert (got.result.report.rows_read, got.dropped) == (5 * 8_999, {"warm_up": 5 * 8_448})
    assert (got.result.sequences, got.result.tokens) == (10, 5 * 551)
    assert [layer.block for layer in Trace.open(got.result.out).topology.layers] == [0, 8, 12, 18, 23]
    row = got.rows["layer8:2"]
    assert row.experts[0].tolist() == [-1] * 4 + [34, 43, 46, 6] + [-1] * 12  # line 8,450 of layer8.jsonl
    assert got.rows["layer23:3"].experts[-1].tolist() == [-1] * 16 + [58, 38, 31, 40]
    notes = Trace.open(got.result.out).header.notes
    assert {note.kind for note in notes if "not joined" in note.sentence} == {"layers_apart"}
    assert {note.kind for note in notes} == {"layers_apart", "tokens_apart", "remark"}


@pytest.mark.parametrize("layer", [0, 8, 12, 18, 23])
def test_a_vllm_log_of_a_run_alone(layer: int, imported: Import, raw: Path) -> None:
    got = imported(raw / "vllm-jsonl-by-layer" / f"layer{layer}.jsonl.gz")
    assert (got.result.format, got.result.report.rows_read, got.dropped) == ("vllm-jsonl", 8_999, {"warm_up": 8_448})
    assert (got.result.sequences, got.result.tokens) == (2, 551)
    assert Trace.open(got.result.out).topology.layers[0].block == layer


def test_moe_beyond_csv(imported: Import, raw: Path) -> None:
    # wc -l: 1,223 + 833 + 859 with a header each; 26 layers of 47, 32 and 33 tokens
    got = imported(raw / "moe-beyond-csv")
    assert (got.result.format, got.result.report.rows_read, got.dropped) == ("moe-beyond-csv", 2_912, {})
    assert (got.result.sequences, got.result.tokens) == (3, 47 + 32 + 33)
    assert {name: row.num_tokens for name, row in got.rows.items()} == {
        "prompt_10_data:0": 47,
        "prompt_11_data:0": 32,
        "prompt_1_data:0": 33,
    }
    assert got.layer("prompt_1_data:0", 0)[0] == [8, 26, 56, 57, 60, 43]  # line 2
    assert got.layer("prompt_1_data:0", 1)[1] == [35, 42, 60, 61, 63, 4]  # line 36
    assert got.layer("prompt_1_data:0", 25)[32] == [24, 36, 52, 54, 56, 17]  # line 859
    assert [layer.block for layer in Trace.open(got.result.out).topology.layers] == list(range(1, 27))


def test_printed_tensors(imported: Import, raw: Path) -> None:
    # grep of pairs: 4,096 + 8,032 + 6,432 = 32 x (128 + 251 + 201); 41, 18 and 10 forwards, the first of each a prefill
    got = imported(raw / "mixtral-text")
    assert (got.result.format, got.result.report.rows_read, got.dropped) == ("mixtral-text", 18_560, {})
    assert {name: (row.num_tokens, row.prompt_tokens) for name, row in got.rows.items()} == {
        "139916882249008:0": (128, 88),
        "139916901617104:0": (251, 234),
        "139918224968400:0": (201, 192),
    }
    row = got.rows["139916882249008:0"]
    assert got.layer(row.sequence, 0)[:3] == [[5, 1], [5, 2], [6, 5]]
    assert got.layer(row.sequence, 31)[-1] == [2, 7]  # the last line of the file
    assert row.token_ids is not None
    assert row.token_ids[:4].tolist() == [1, 733, 16289, 28793]
    assert row.token_ids[-1] == 28723


def test_speculative_log_with_missing_cells(imported: Import, raw: Path) -> None:
    # awk over token_idx: 77 tokens have 32 lines (2,464), the other 6 have 115 together
    got = imported(raw / "speculative-moe-jsonl")
    assert (got.result.format, got.result.report.rows_read) == ("speculative-moe-jsonl", 2_579)
    assert got.dropped == {"incomplete_token": 115}
    assert (got.result.sequences, got.result.tokens) == (1, 77)
    (name,) = got.rows
    assert [got.layer(name, layer)[3] for layer in (0, 1, 31)] == [[3, 2], [4, 2], [6, 3]]
    assert Trace.open(got.result.out).header.weights == "normalized"
    assert any("calls were missed" in note.sentence for note in got.result.report.notes)


def test_switch_counts_become_a_load_table(imported: Import, raw: Path) -> None:
    # three models of 12 MoE layers and 100 batches
    got = imported(raw / "switch-counts")
    assert (got.result.format, got.result.kind, got.result.sequences) == ("switch-counts", "load", 0)
    assert (got.result.report.rows_read, got.dropped) == (3 * 12 * 100, {})
    table = LoadTable.open(got.result.out)
    run = "encoder_mgblcks_8_experts_1_gpus_normalrun_get_tokens_per_exp"
    layers = table.header.runs[run]
    assert [(layer.stack, layer.block) for layer in layers] == [
        (stack, block) for stack in ("encoder", "decoder") for block in (1, 3, 5, 7, 9, 11)
    ]
    rows = {(row.run, row.layer, row.batch): row.counts.tolist() for row in table}
    assert rows[run, 1, 3] == [3974, 3204, 2897, 2603, 4833, 3015, 2655, 6302]  # moe_l3[0], the iteration is 3
    assert rows[run, 6, 102] == [0, 250, 0, 0, 0, 0, 0, 0]  # moe_l1_decode[99]


def test_router_logits(imported: Import, raw: Path) -> None:
    # offsets 0, 86, 159, 423, 506, 607; ids by sorting the 64 logits, larger first
    got = imported(raw / "olmoe-logits")
    assert (got.result.format, got.result.report.rows_read, got.dropped) == ("olmoe-logits", 607, {})
    assert [row.num_tokens for row in got.rows.values()] == [86, 73, 264, 83, 101]
    assert got.layer("0", 0)[0] == [34, 57, 46, 51, 21, 44, 17, 59]
    assert got.layer("1", 3)[0] == [39, 61, 15, 63, 43, 51, 31, 29]
    assert got.layer("4", 15)[-1] == [24, 44, 9, 17, 53, 12, 8, 40]
    scores = got.rows["0"].scores
    assert scores is not None
    assert scores.shape == (86, 16 * 64)
    assert any("132 choices" in note.sentence for note in got.result.report.notes)


@pytest.mark.parametrize(
    ("name", "sequences", "tokens", "described"),
    [
        ("mixtral-8x7b-instruct_mtbench", 100, 39_220, "32 causal layers x 8 experts, top-2"),
        ("deepseek-v2-lite_esft-summary", 13, 8_479, "26 causal layers x 64 experts, top-6"),
    ],
)
def test_one_file_traces(
    name: str, sequences: int, tokens: int, described: str, imported: Import, shared: Path
) -> None:
    source = shared / "traces" / f"{name}.npz"
    got = imported(source)
    assert (got.result.format, got.result.described) == ("npz", described)
    assert (got.result.sequences, got.result.tokens, got.result.report.rows_read) == (sequences, tokens, tokens)
    for there in Trace.open(source).sequences():
        here = got.rows[there.sequence]
        assert np.array_equal(here.experts, there.experts)
        assert (here.group, here.prompt_tokens) == (there.group, there.prompt_tokens)
