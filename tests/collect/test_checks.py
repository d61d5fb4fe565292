"""Checks over whole traces: each kind of damage is reported with its file and row, and nothing sound is."""

from __future__ import annotations

import gzip
import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from foregate.collect.checks import DUMMY_ROWS, DUMMY_TOKENS, check_trace
from foregate.collect.errors import TraceError
from foregate.collect.shard import SCHEMA, table_of
from foregate.collect.topology import MoeTopology
from foregate.collect.trace import SequenceRouting, Trace, TraceHeader
from foregate.collect.writer import TraceWriter, WriterConfig
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st


@pytest.fixture
def path(tmp_path, header, make_row) -> Path:
    """Give a sound trace of 6 rows in 2 shards."""
    with TraceWriter(tmp_path / "t", header, config=WriterConfig(shard_rows=3)) as writer:
        for number in range(6):
            writer.write(make_row(f"s{number}"))
    return tmp_path / "t"


def reasons(path: Path) -> list[str]:
    return [str(problem).replace(str(path), "T") for problem in check_trace(path)]


def rewrite(path: Path, rows: list[SequenceRouting]) -> Path:
    shard = sorted(path.glob("shard-*"))[0]
    pq.write_table(table_of(rows), shard)
    return shard


def test_a_sound_trace_has_no_problems(path) -> None:
    assert reasons(path) == []


def test_problems_name_file_and_row(path, make_row) -> None:
    good, bad = make_row("a"), make_row("b")
    bad = replace(bad, experts=bad.experts.copy())
    bad.experts[2, 5] = 9
    rewrite(path, [good, bad, replace(good, sequence="c", token_ids=good.token_ids + 100)])
    first, second = list(check_trace(path))
    assert first.to_json() == {
        "file": str(path / "shard-00000-00000.parquet"),
        "row": 1,
        "reason": "expert 9 at token 2, MoE layer 2, is out of range 0..3 (1 such entries)",
    }
    assert second.row == 2
    assert "token ids run from" in second.reason


def test_no_trace_at_all(tmp_path) -> None:
    assert "is no routing trace: it has no trace.json" in reasons(tmp_path)[0]
    assert "is no routing trace" in reasons(tmp_path / "absent")[0]
    (tmp_path / "some.txt").write_text("words")
    assert "is no routing trace" in reasons(tmp_path / "some.txt")[0]
    (tmp_path / "trace.json").write_text("{")
    assert "is not readable JSON" in reasons(tmp_path)[0]
    (tmp_path / "trace.json").write_text("[]")
    assert "is no trace header" in reasons(tmp_path)[0]


def test_other_format_version(path) -> None:
    value = json.loads((path / "trace.json").read_text())
    for version in (2, None, "1"):
        (path / "trace.json").write_text(json.dumps({**value, "format_version": version}))
        assert f"has format version {version!r}; this foregate reads version 1" in reasons(path)[0]


@pytest.mark.parametrize(
    "layers", [None, 5, {}, {"layers": []}, {"layers": 3}, {"layers": [{"stack": "causal"}]}, {"layers": ["x"]}]
)
def test_header_without_usable_topology(path, layers) -> None:
    value = json.loads((path / "trace.json").read_text())
    (path / "trace.json").write_text(json.dumps({**value, "topology": layers}))
    assert "is no usable header" in reasons(path)[0]


@pytest.mark.parametrize("keep", [0, 3, 200, -1])
def test_truncated_shard_is_one_problem_and_the_others_are_still_checked(path, make_row, keep) -> None:
    shard = path / "shard-00000-00000.parquet"
    shard.write_bytes(shard.read_bytes()[:keep])
    rewritten = path / "shard-00000-00001.parquet"
    row = make_row("x")
    pq.write_table(table_of([replace(row, experts=row.experts * 0)]), rewritten)
    found = list(check_trace(path))
    assert [problem.file for problem in found[:1]] == [str(shard)]
    assert "is damaged" in found[0].reason
    assert {problem.file for problem in found[1:]} == {str(rewritten)}
    with pytest.raises(TraceError, match="is damaged"):
        list(Trace.open(path))


def contents(path: Path) -> list:
    return [
        (row.sequence, row.part, row.group, row.experts.tolist(), row.token_ids.tolist(), row.weights.tolist())
        for row in Trace.open(path)
    ]


def test_a_row_group_that_claims_no_rows_is_damage(path) -> None:
    shard = path / "shard-00000-00000.parquet"
    data = bytearray(shard.read_bytes())
    (rows_at,) = [match.start() + 1 for match in re.finditer(rb"\x16\x06\x26", bytes(data))]  # 3, as zigzag varint
    data[rows_at] = 0
    shard.write_bytes(data)
    assert any("its footer says 3" in reason for reason in reasons(path))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(places=st.lists(st.floats(0, 1, exclude_max=True), min_size=1, max_size=3), byte=st.integers(0, 255))
def test_a_damaged_byte_is_found_or_changes_nothing(path, places, byte) -> None:
    shard = path / "shard-00000-00000.parquet"
    whole, before = shard.read_bytes(), contents(path)
    data = bytearray(whole)
    for place in places:
        data[int(place * len(data))] = byte
    try:
        shard.write_bytes(bytes(data))
        assert reasons(path) or contents(path) == before
    finally:
        shard.write_bytes(whole)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.floats(0, 1, exclude_max=True), byte=st.integers(0, 255))
def test_a_damaged_npz_is_found_or_still_sound(tmp_path, place, byte) -> None:
    data = bytearray(npz(tmp_path / "a.npz").read_bytes())
    data[int(place * len(data))] = byte
    (tmp_path / "a.npz").write_bytes(bytes(data))
    for problem in check_trace(tmp_path / "a.npz"):  # and nothing is raised
        assert problem.reason


def test_a_misfit_row_does_not_hide_the_next(path, make_row) -> None:
    rows = [make_row("a"), make_row("b"), make_row("c")]
    table = table_of(rows)
    experts = table.column("experts").to_pylist()
    experts[0] = experts[0][:-1]
    experts[2][0] = 77
    index = table.column_names.index("experts")
    table = table.set_column(index, SCHEMA.field("experts"), pa.array(experts, pa.list_(pa.int16())))
    pq.write_table(table, path / "shard-00000-00000.parquet")
    found = sorted((problem.row, problem.reason) for problem in check_trace(path))
    assert [row for row, _ in found] == [0, 2]
    assert "no multiple of 6" in found[0][1]
    assert "expert 77" in found[1][1]
    with pytest.raises(TraceError, match="row 0: its experts are no multiple of 6"):
        list(Trace.open(path))


def test_missing_column_other_types_and_nulls(path, make_row) -> None:
    shard, table = path / "shard-00000-00000.parquet", table_of([make_row("a")])
    pq.write_table(table.drop(["experts"]), shard)
    assert "lacks the column 'experts'" in reasons(path)[0]
    index = table.column_names.index("experts")
    wide = pa.array(table.column("experts").to_pylist(), pa.large_list(pa.int64()))
    pq.write_table(table.set_column(index, "experts", wide), shard)
    assert reasons(path) == []
    holes = pa.array([[*range(29), None]], pa.list_(pa.int16()))
    pq.write_table(table.set_column(index, "experts", holes), shard)
    assert "nulls inside" in reasons(path)[0]
    pq.write_table(table.set_column(index, "experts", pa.array(["words"])), shard)
    assert "is damaged" in reasons(path)[0]
    pq.write_table(table.set_column(index, "experts", pa.array([[70000] * 30])), shard)
    assert "is damaged" in reasons(path)[0]


def test_duplicate_sequences_and_missing_parts(path, make_row) -> None:
    rewrite(path, [make_row("s4"), make_row("p", part=0), make_row("p", part=2)])
    found = reasons(path)
    assert any("part 2 of sequence 'p' (causal) follows part 0" in reason for reason in found)
    assert any("part 0 of sequence 's4' (causal) stands twice" in reason for reason in found)
    with pytest.raises(TraceError, match="does not follow part 1"):
        list(Trace.open(path).sequences())


def test_all_zeros(tmp_path) -> None:
    header = TraceHeader(topology=MoeTopology.uniform(2, 8, 1))
    zero = SequenceRouting(sequence="a", experts=np.zeros((9, 2), np.int16))
    with TraceWriter(tmp_path / "t", header) as writer:
        writer.write(replace(zero, experts=zero.experts + 1))
    rewrite(tmp_path / "t", [zero])
    assert "all 18 choices of its causal rows are expert 0" in reasons(tmp_path / "t")[0]
    rewrite(tmp_path / "t", [zero, replace(zero, sequence="b", experts=zero.experts + 1)])
    assert reasons(tmp_path / "t") == []


def test_warm_up_rows_and_tokens(path, make_row) -> None:
    row = make_row("a", 1)
    alike = [replace(row, sequence=str(number)) for number in range(DUMMY_ROWS)]
    rewrite(path, alike[:-1])
    assert reasons(path) == []
    rewrite(path, [make_row("first"), *alike])
    assert len(reasons(path)) == 1
    assert f"row {DUMMY_ROWS}: this and the {DUMMY_ROWS - 1} causal rows before it are identical" in reasons(path)[0]

    def dummy(count: int) -> SequenceRouting:
        token, rest = make_row("t", 1), make_row("r", 40)
        repeated = {
            name: np.concatenate([getattr(rest, name), np.repeat(getattr(token, name), count, axis=0)])
            for name in ("experts", "token_ids", "weights")
        }
        return replace(token, **repeated)

    rewrite(path, [dummy(DUMMY_TOKENS - 1)])
    assert reasons(path) == []
    rewrite(path, [dummy(DUMMY_TOKENS)])
    assert f"{DUMMY_TOKENS} equal tokens from token 40 on are routed alike" in reasons(path)[0]


def test_a_trace_without_rows(path) -> None:
    for shard in path.glob("shard-*"):
        shard.unlink()
    assert reasons(path) == ["T: it holds no rows"]


def npz(path: Path, **arrays: np.ndarray) -> Path:
    generator = np.random.default_rng(0)
    good = {
        "experts": np.argsort(generator.random((10, 2, 8)))[..., :2].astype(np.uint8),
        "offsets": np.array([0, 4, 10]),
    }
    np.savez(path, **{name: value for name, value in {**good, **arrays}.items() if value is not None})  # type: ignore[arg-type]
    return path


def test_npz(tmp_path) -> None:
    assert reasons(npz(tmp_path / "a.npz")) == []
    for offsets in ([0, 4, 9], [1, 10], [0, 6, 4, 10], [], [0], 7, [0, 4.5, 10]):
        assert "offsets must rise from 0" in reasons(npz(tmp_path / "a.npz", offsets=np.array(offsets)))[0]
    for name in ("experts", "offsets"):
        assert f"has no array {name!r}" in reasons(npz(tmp_path / "a.npz", **{name: None}))[0]
    assert "experts must be integers" in reasons(npz(tmp_path / "a.npz", experts=np.zeros((10, 4))))[0]
    assert "are not distinct" in reasons(npz(tmp_path / "a.npz", experts=np.ones((10, 2, 2), np.uint8)))[0]
    assert (
        "token_ids must be integers (10,), got int64 (3,)"
        in reasons(npz(tmp_path / "a.npz", token_ids=np.arange(3)))[0]
    )
    assert (
        "conversation must be integers or strings (2,), got int64 (1,)"
        in reasons(npz(tmp_path / "a.npz", conversation=np.arange(1)))[0]
    )
    assert "prompt_tokens is 5" in reasons(npz(tmp_path / "a.npz", prompt_len=np.array([5, 1])))[0]
    for name, array, reason in (
        ("token_ids", np.full(10, np.nan), "token_ids must be integers (10,), got float64"),
        ("token_ids", np.ones((10, 2), int), "token_ids must be integers (10,), got int64 (10, 2)"),
        ("token_ids", np.full(10, 2**40), "token_ids run from 1099511627776 to 1099511627776, legal is 0..2147483647"),
        ("token_ids", np.full(10, -5), "token_ids run from -5 to -5"),
        ("prompt_len", np.array([np.nan, 1]), "prompt_len must be integers (2,), got float64"),
        ("prompt_len", np.array([1.5, 1]), "prompt_len must be integers (2,), got float64"),
        ("prompt_len", np.array(["a", "b"]), "prompt_len must be integers (2,), got <U1"),
        ("category", np.ones((2, 2)), "category must be integers or strings (2,), got float64 (2, 2)"),
        ("weights", np.ones((10, 2)), "weights must be floats (10, 2, 2), got float64 (10, 2)"),
        ("category", np.array(["\ud800", "b"]), "its category '\\ud800' is no valid Unicode"),
    ):
        assert reason in reasons(npz(tmp_path / "a.npz", **{name: array}))[0]
    wide = np.full((10, 2, 2), np.nan, np.float16)
    assert "not all finite" in reasons(npz(tmp_path / "a.npz", weights=wide))[0]
    (tmp_path / "b.npz").write_bytes((tmp_path / "a.npz").read_bytes()[:100])
    assert "is no readable .npz trace" in reasons(tmp_path / "b.npz")[0]
    (tmp_path / "b.npz").write_text("words")
    assert "is no readable .npz trace" in reasons(tmp_path / "b.npz")[0]
    assert "is no readable .npz trace" in reasons(tmp_path / "absent.npz")[0]
    np.savez(tmp_path / "p.npz", experts=np.array([object()]), offsets=np.array([0]))
    assert "is no readable .npz trace" in reasons(tmp_path / "p.npz")[0]


def test_real_traces_are_sound(shared) -> None:
    for file in [*(shared / "traces").glob("*esft*.npz"), shared / "traces/mixtral-8x7b-instruct_mtbench.npz"]:
        assert list(check_trace(file)) == []


def test_warm_up_of_a_real_log_is_found(shared, tmp_path) -> None:
    log = next((shared / "traces/raw/vllm-jsonl").glob("*.jsonl.gz"))
    rows: list[list[int]] = []
    with gzip.open(log, "rt") as lines:
        for line in lines:
            value = json.loads(line)
            if value.get("type") == "route":
                rows.append(value["topk_ids"])
            if len(rows) == 20_000:
                break
    experts = np.array(rows, np.int16)[:, None]
    np.savez(tmp_path / "log.npz", experts=experts, offsets=np.array([0, len(experts)]))
    assert "equal tokens from token 0 on are routed alike: a warm-up" in reasons(tmp_path / "log.npz")[0]
