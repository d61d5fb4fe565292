"""Merging: every row of every source once; what does not belong together is refused with file, row and reason."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from foregate.collect.checks import check_trace
from foregate.collect.errors import SettingError, TraceError
from foregate.collect.merge import merge
from foregate.collect.sequence import PART_TOKENS, SequenceRouting
from foregate.collect.shard import table_of
from foregate.collect.topology import MoeLayer, MoeTopology
from foregate.collect.trace import Trace, TraceHeader
from foregate.collect.writer import TraceWriter, WriterConfig
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

Write = Callable[..., Path]
COLUMNS = ("sequence", "stack", "part", "group", "category", "source", "prompt_tokens", "text")


@pytest.fixture
def write(tmp_path, header) -> Write:
    """Give a writer of traces: write(name, rows, **header fields)."""

    def written(name: str, rows: list[SequenceRouting], *, text: bool = False, shard_rows: int = 3, **fields) -> Path:
        config = WriterConfig(shard_rows=shard_rows)
        with TraceWriter(tmp_path / name, replace(header, **fields), text=text, config=config) as writer:
            for row in rows:
                writer.write(row)
        return tmp_path / name

    return written


def same(a: SequenceRouting, b: SequenceRouting) -> bool:
    arrays = ("experts", "token_ids", "weights", "scores")
    return [getattr(a, name) for name in COLUMNS] == [getattr(b, name) for name in COLUMNS] and all(
        np.array_equal(getattr(a, name), getattr(b, name)) if getattr(a, name) is not None else getattr(b, name) is None
        for name in arrays
    )


def refused(match: str, sources: list[Path], out: Path, error: type[Exception] = TraceError) -> None:
    """Merge in vain: one sentence, nothing left, the sources as they were."""
    before = {item: item.read_bytes() for item in out.parent.rglob("*") if item.is_file()}
    with pytest.raises(error, match=match) as raised:
        merge(sources, out)
    assert "\n" not in str(raised.value)
    assert {item: item.read_bytes() for item in out.parent.rglob("*") if item.is_file()} == before
    assert not list(out.parent.glob(".*"))


def test_rows_come_in_the_order_of_the_sources(tmp_path, write, make_row) -> None:
    first = [make_row(f"a{n}", n + 1, group="g", category="c", source=f"d:{n}", prompt_tokens=1) for n in range(7)]
    second = [make_row("b0", 2 * PART_TOKENS + 5, text="words"), make_row("b1", weights=None), make_row("b2")]
    sources = [write("a", first), write("b", second, text=True, seed=4)]
    result = merge(sources, tmp_path / "out", config=WriterConfig(shard_rows=4))
    assert result[1:] == (10, sum(row.num_tokens for row in first + second), 3, 2)
    merged = Trace.open(tmp_path / "out")
    assert all(same(*pair) for pair in zip([*Trace.open(sources[0]), *Trace.open(sources[1])], merged, strict=True))
    assert [row.sequence for row in merged.sequences()] == [row.sequence for row in first + second]
    assert list(check_trace(tmp_path / "out")) == []
    for shard in merged.shards:  # a sequence never straddles shards
        others = {row.sequence for other in merged.shards if other != shard for row in read(merged, other)}
        assert not others & {row.sequence for row in read(merged, shard)}
    assert merged.header.seed is None  # they differ
    assert merged.header.model == "tiny"
    assert [(made["trace"], made["seed"]) for made in merged.header.recording["merged"]] == [("a", 3), ("b", 4)]


def read(trace: Trace, shard: Path) -> list[SequenceRouting]:
    return list(Trace(trace.path, trace.header, [shard]))


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(counts=st.lists(st.integers(1, 7), min_size=1, max_size=4), shard_rows=st.integers(1, 6))
def test_any_split_merges_to_the_whole(tmp_path_factory, header, make_row, counts, shard_rows) -> None:
    folder = tmp_path_factory.mktemp("split")
    rows, sources = [], []
    for index, count in enumerate(counts):
        own = [make_row(f"{index}-{n}", 1 + n) for n in range(count)]
        with TraceWriter(folder / str(index), header) as writer:
            for row in own:
                writer.write(row)
        rows += own
        sources.append(folder / str(index))
    result = merge(sources, folder / "out", config=WriterConfig(shard_rows=shard_rows))
    assert all(same(*pair) for pair in zip(rows, Trace.open(folder / "out"), strict=True))
    assert result.shards == -(-len(rows) // shard_rows)


def test_one_trace_is_rewritten_as_it_is(tmp_path, write, make_row) -> None:
    source = write("a", [make_row(f"s{n}") for n in range(7)], shard_rows=1)
    assert merge([source], tmp_path / "out").shards == 1
    assert Trace.open(tmp_path / "out").header == Trace.open(source).header


def test_what_a_source_does_not_know_is_taken_from_another(tmp_path, write, make_row, topology) -> None:
    bare = MoeTopology(layers=topology.layers)
    unknown = write("a", [make_row("a")], topology=bare, vocab_size=None, dtype="", model="")
    known = write("b", [make_row("b")], model_fingerprint="1234", weights="finite")
    merge([unknown, known], tmp_path / "out")
    header = Trace.open(tmp_path / "out").header
    assert header.topology == topology
    assert (header.vocab_size, header.dtype, header.model_fingerprint, header.weights) == (
        100,
        "float32",
        "1234",
        "finite",
    )


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"model_fingerprint": "2"}, r"b.trace\.json has model_fingerprint '2', .*a has '1'"),
        ({"tokenizer_fingerprint": "2"}, "tokenizer_fingerprint"),
        ({"vocab_size": 101}, "has vocab_size 101, .* has 100"),
        ({"dtype": "bfloat16"}, "dtype 'bfloat16'"),
        ({"weights": "unit"}, "weights 'unit'"),
        ({"scores": "selection"}, "scores 'selection'"),
        ({"topology": "small"}, r"topology '3 causal layers x 4/6/8 experts, top-1/3', .*top-1/2/3"),
        ({"topology": "bytes"}, "expert_bytes 97"),
    ],
)
def test_sources_that_do_not_belong_together(tmp_path, write, make_row, topology, fields, reason) -> None:
    declared = {"model_fingerprint": "1", "tokenizer_fingerprint": "1", "weights": "finite"}
    first = write("a", [make_row("a")], **declared)
    if fields.get("topology") == "bytes":
        fields = {"topology": replace(topology, expert_bytes=97)}
    elif "topology" in fields:
        layers = (replace(topology.layers[0], top_k=1), *topology.layers[1:])
        fields = {"topology": MoeTopology(layers=layers)}
    row = make_row("b")
    if "topology" in fields and fields["topology"].layers != topology.layers:
        row = replace(row, experts=row.experts[:, 1:], weights=row.weights[:, 1:])
    if "scores" in fields:
        row = replace(row, scores=scores_for(row, topology))
    second = write("b", [row], **{**declared, **fields})
    refused(reason, [first, second], tmp_path / "out")


def scores_for(row: SequenceRouting, topology: MoeTopology) -> np.ndarray:
    """Give scores whose largest are the row's experts."""
    parts = []
    for layer, ids in zip(topology.layers, row.layer_experts(topology), strict=True):
        scores = np.zeros((row.num_tokens, layer.num_experts), np.float32)
        np.put_along_axis(scores, ids.astype(np.intp), 1.0, axis=1)
        parts.append(scores)
    return np.concatenate(parts, axis=1)


def test_scores_are_merged_and_checked(tmp_path, write, make_row, topology) -> None:
    rows = [replace(make_row(name), scores=scores_for(make_row(name), topology)) for name in "ab"]
    sources = [write(row.sequence, [row], scores="selection") for row in rows]
    merge(sources, tmp_path / "out")
    assert all(same(*pair) for pair in zip(rows, Trace.open(tmp_path / "out"), strict=True))
    shard = next(sources[1].glob("shard-*"))
    pq.write_table(table_of([replace(rows[1], scores=rows[1].scores[:, ::-1].copy())], scores=True), shard)
    refused(
        r"b.shard-00000-00000\.parquet, row 0: .* are not those with the largest scores", sources, tmp_path / "out2"
    )


def test_a_sequence_that_stands_in_two_sources(tmp_path, write, make_row) -> None:
    first = write("a", [make_row("x"), make_row("y")])
    second = write("b", [make_row(name) for name in ("p", "q", "r", "s", "y")])
    reason = rf"b.shard-00000-00001\.parquet, row 1: sequence 'y' stands in .*{first.name} too"
    refused(reason, [first, second], tmp_path / "out")
    refused("row 0: sequence 'x' stands in", [first, first], tmp_path / "out")


def test_damage_is_named_by_file_and_row_whatever_was_merged_before(tmp_path, write, make_row) -> None:
    good = write("a", [make_row(f"a{n}") for n in range(9)])
    bad = write("b", [make_row(f"b{n}") for n in range(6)])
    shard = bad / "shard-00000-00001.parquet"
    whole = shard.read_bytes()
    row = make_row("b4")
    high, twice = row.experts.copy(), row.experts.copy()
    high[2, 5], twice[1, :2] = 9, 3
    for damaged, reason in [
        (replace(row, experts=high), r"row 1: expert 9 at token 2, MoE layer 2, is out of range 0\.\.3"),
        (replace(row, experts=twice), r"row 1: experts \[3, 3\] at token 1, MoE layer 0, are not distinct"),
        (replace(row, token_ids=row.token_ids + 100), "row 1: its token ids run from"),
        (replace(row, sequence="b0", part=2), r"row 1: part 2 of sequence 'b0' \(causal\) follows part 0"),
        (make_row("b4", PART_TOKENS + 1), f"row 1: it has {PART_TOKENS + 1} tokens"),
    ]:
        pq.write_table(table_of([make_row("b3"), damaged]), shard)
        refused(rf"b.shard-00000-00001\.parquet, {reason}", [good, bad], tmp_path / "out")
    zeros = SequenceRouting(sequence="b3", experts=np.zeros((9, 6), np.int16))
    pq.write_table(table_of([zeros]), shard)
    refused("b.shard-00000-00001.parquet, row 0: experts .* are not distinct", [good, bad], tmp_path / "out")
    shard.write_bytes(whole[: len(whole) // 2])
    refused(r"b.shard-00000-00001\.parquet is damaged", [good, bad], tmp_path / "out")
    value = json.loads((bad / "trace.json").read_text())
    (bad / "trace.json").write_text(json.dumps({**value, "format_version": 2}))
    refused(r"b.trace\.json has format version 2; this foregate reads version 1", [good, bad], tmp_path / "out")
    refused("absent is no routing trace", [good, tmp_path / "absent"], tmp_path / "out")


def test_rows_of_a_router_that_never_ran(tmp_path) -> None:
    header = TraceHeader(topology=MoeTopology.uniform(2, 8, 1))
    row = SequenceRouting(sequence="a", experts=np.ones((9, 2), np.int16))
    for name in ("good", "zeros"):
        with TraceWriter(tmp_path / name, header) as writer:
            writer.write(replace(row, sequence=name))
    shard = tmp_path / "zeros" / "shard-00000-00000.parquet"
    pq.write_table(table_of([replace(row, experts=row.experts * 0)]), shard)
    reason = r"zeros.shard-00000-00000\.parquet: all 18 choices of its causal rows are expert 0"
    refused(reason, [tmp_path / "good", tmp_path / "zeros"], tmp_path / "out")


def test_nothing_is_written_over(tmp_path, write, make_row) -> None:
    first, second = write("a", [make_row("a")]), write("b", [make_row("b")])
    refused("exists already", [first, second], second, SettingError)
    refused("exists already", [first, second], next(second.glob("shard-*")), SettingError)


def test_traces_without_rows(tmp_path, write, make_row) -> None:
    empty = write("a", [make_row("a")])
    next(empty.glob("shard-*")).unlink()
    refused("there are no rows to merge", [empty], tmp_path / "out")


def npz(path: Path, experts: np.ndarray) -> Path:
    np.savez(path, experts=experts, offsets=np.array([0, 2, len(experts)]))
    return path


def test_files_of_numpy_are_merged_where_the_topology_is_the_same(tmp_path) -> None:
    generator = np.random.default_rng(0)
    files = [
        npz(tmp_path / f"{name}.npz", np.argsort(generator.random((5, 2, 8)))[..., :3].astype(np.uint8))
        for name in "ab"
    ]
    layers = tuple(MoeLayer(stack="causal", block=i, num_experts=8, top_k=3) for i in range(2))
    known = TraceHeader(topology=MoeTopology(layers=layers, hidden_size=7), vocab_size=50)
    experts = np.argsort(generator.random((4, 2, 8)))[..., :3].reshape(4, 6)
    with TraceWriter(tmp_path / "t", known) as writer:
        writer.write(SequenceRouting(sequence="c", experts=experts, token_ids=np.array([1, 2, 3, 49])))
    result = merge([*files, tmp_path / "t"], tmp_path / "out")
    assert result[1:] == (5, 14, 1, 3)
    merged = Trace.open(tmp_path / "out")
    assert [row.sequence for row in merged] == ["a.npz:0", "a.npz:1", "b.npz:0", "b.npz:1", "c"]
    assert merged.header.topology == known.topology
    assert merged.header.vocab_size == 50
    assert list(check_trace(tmp_path / "out")) == []
    other = npz(tmp_path / "other.npz", np.argsort(generator.random((5, 2, 8)))[..., :2].astype(np.uint8))
    refused(r"other\.npz has topology '2 causal layers x 8 experts, top-2'", [tmp_path / "t", other], tmp_path / "out2")


def test_a_real_trace_in_two_halves(tmp_path, shared) -> None:
    path = shared / "traces" / "mixtral-8x7b-instruct_mtbench.npz"
    whole = Trace.open(path)
    rows = list(whole)
    for name, half in (("a", rows[::2]), ("b", rows[1::2])):
        with TraceWriter(tmp_path / name, whole.header) as writer:
            for row in half:
                writer.write(row)
    result = merge([tmp_path / "a", tmp_path / "b"], tmp_path / "out")
    assert (result.sequences, result.tokens) == (len(rows), sum(row.num_tokens for row in rows))
    by_name = {row.sequence: row for row in Trace.open(tmp_path / "out").sequences()}
    assert all(np.array_equal(by_name[row.sequence].experts, row.experts) for row in rows)
