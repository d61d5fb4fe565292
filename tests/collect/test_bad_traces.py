"""Traces from outside that are wrong: validate, merge and every reader say so in one sentence, at once and cheaply."""

from __future__ import annotations

import io
import json
import tracemalloc
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from foregate.cli.main import main
from foregate.collect.checks import check_trace
from foregate.collect.errors import TraceError
from foregate.collect.merge import merge
from foregate.collect.sequence import SequenceRouting
from foregate.collect.shard import VERSION_KEY, table_of
from foregate.collect.topology import MoeTopology
from foregate.collect.trace import Trace, TraceHeader
from foregate.collect.writer import TraceWriter


@pytest.fixture
def path(tmp_path, header, make_row) -> Path:
    """Give a sound trace of 3 rows."""
    with TraceWriter(tmp_path / "t", header) as writer:
        for number in range(3):
            writer.write(make_row(f"s{number}"))
    return tmp_path / "t"


def refused(path: Path, reason: str) -> None:
    """Read, validate and merge in vain; nothing is left and the trace is as it was."""
    files = [path] if path.is_file() else list(path.iterdir())
    before = {file: file.read_bytes() for file in files}
    found = list(check_trace(path))
    assert found
    assert any(reason in str(problem) for problem in found), found
    for read in (lambda: list(Trace.open(path)), lambda: merge([path], path.parent / "out")):
        with pytest.raises(TraceError) as raised:
            read()
        assert reason in str(raised.value)
        assert "\n" not in str(raised.value)
    assert {file: file.read_bytes() for file in files} == before
    assert sorted(item.name for item in path.parent.iterdir()) == [path.name]


def change(path: Path, **values: object) -> None:
    """Change fields of a header."""
    file = path / "trace.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def layer(**values: object) -> dict[str, object]:
    return {"stack": "causal", "block": 0, "num_experts": 8, "top_k": 2, **values}


@pytest.mark.parametrize(
    ("layers", "reason"),
    [
        ([layer(num_experts=10**9)], "claims 1 MoE layers and up to 1000000000 experts in one"),
        ([layer(num_experts=10**9, top_k=10**9)], "claims 1 MoE layers and up to 1000000000 experts in one"),
        ([layer(num_experts=10**400)], "experts in one, at most 16384 and 32768 can be stored"),
        ([layer()] * 20_000, "claims 20000 MoE layers"),
        ([layer(num_experts=32768, top_k=32768)] * 100, "claims 3276800 causal expert ids per token"),
        ([layer(num_experts=8.5)], "'8.5' is no whole number"),
        ([layer(num_experts="8")], "is no topology"),
        ([layer(block=None)], "'None' is no whole number"),
        ([layer(top_k=0)], "top_k must lie in 1..8"),
        ([layer(top_k=9)], "top_k must lie in 1..8"),
        ([layer(stack="side")], "stack must be one of"),
    ],
)
def test_a_header_that_claims_too_much_is_refused_without_allocating_it(path, layers, reason) -> None:
    change(path, topology={"layers": layers})
    tracemalloc.start()
    try:
        problems = list(check_trace(path))
        assert tracemalloc.get_traced_memory()[1] < 50 * 2**20
    finally:
        tracemalloc.stop()
    assert len(problems) == 1
    refused(path, reason)


def test_a_header_that_cannot_be_read(path) -> None:
    file = path / "trace.json"
    for text in ("[" * 100_000, '{"format_version": 1' + "0" * 5000 + "}", "\udce9", ""):
        file.write_text(text, encoding="utf-8", errors="surrogateescape")
        refused(path, "is not readable JSON")
    with file.open("wb") as opened:
        opened.truncate(65 * 2**20)  # a sparse file; nothing of it is read
    refused(path, "at most 67108864 are read")


@pytest.mark.parametrize(
    "values",
    [
        {"vocab_size": "many"},
        {"vocab_size": 1.5},
        {"seed": []},
        {"model": None},
        {"versions": []},
        {"generation": 3},
        {"weights": ["unit"]},
        {"scores": "logits"},
        {"dtype": 16},
    ],
)
def test_a_header_field_of_another_type(path, values) -> None:
    change(path, **values)
    refused(path, f"is no usable header: {next(iter(values))} must be")


def test_a_header_of_before_there_were_scores_opens(path) -> None:
    value = json.loads((path / "trace.json").read_text())
    assert value.pop("scores") == ""
    (path / "trace.json").write_text(json.dumps(value))
    assert Trace.open(path).header.scores == ""
    assert list(check_trace(path)) == []


def test_another_format_version_in_header_or_shard(path, make_row) -> None:
    shard = next(path.glob("shard-*"))
    whole = shard.read_bytes()
    table = table_of([make_row("s0")])
    for version in (b"2", b"\xff"):
        pq.write_table(table.replace_schema_metadata({VERSION_KEY: version}), shard)
        refused(path, f"{shard} has format version")
    pq.write_table(table.replace_schema_metadata({}), shard)  # written before shards carried it
    assert list(check_trace(path)) == []
    shard.write_bytes(whole)
    change(path, format_version=2)
    refused(path, "trace.json has format version 2; this foregate reads version 1")


def test_ids_out_of_range_are_refused_wherever_a_trace_is_read(path, make_row) -> None:
    shard, row = next(path.glob("shard-*")), make_row("b")
    for expert in (4, 32767, -2):
        experts = row.experts.copy()
        experts[3, 5] = expert
        pq.write_table(table_of([make_row("a"), replace(row, experts=experts)]), shard)
        refused(path, f"{shard}, row 1: expert {expert} at token 3, MoE layer 2, is out of range 0..3")


@pytest.mark.parametrize("share", [0.0, 0.3, 0.7, 0.99])
def test_a_truncated_shard(path, share) -> None:
    shard = next(path.glob("shard-*"))
    shard.write_bytes(shard.read_bytes()[: int(share * shard.stat().st_size)])
    refused(path, f"{shard} is damaged")


def npz(path: Path, **arrays: np.ndarray) -> Path:
    experts = np.argsort(np.random.default_rng(0).random((10, 2, 8)))[..., :2]
    np.savez(path, **{"experts": experts, "offsets": np.array([0, 4, 10]), **arrays})
    return path


def test_a_file_with_wrong_ids_or_offsets_names_the_row(tmp_path) -> None:
    experts = np.argsort(np.random.default_rng(0).random((10, 2, 8)))[..., :2]
    for expert in (2**15, 2**40, -2):
        experts[6, 1, 0] = expert
        file = npz(tmp_path / "a.npz", experts=experts)
        refused(file, f"a.npz, row 1: expert {expert} at token 2, MoE layer 1, is out of range -1..32767")
    for offsets in (np.array([0, 6, 4, 10]), np.array([0, 6, 4, 10], np.uint64)):
        refused(npz(tmp_path / "a.npz", offsets=offsets), "a.npz, row 1: offsets must rise from 0")
    refused(npz(tmp_path / "a.npz", offsets=np.array([0, 4, 11])), "got int64 0 to 11")


def test_a_file_of_zeros(tmp_path) -> None:
    file = npz(tmp_path / "a.npz", experts=np.zeros((10, 2, 1), np.uint8))
    refused(file, "a.npz, row 0: all 20 choices are expert 0: the recording of a router that never ran")
    experts = np.zeros((10, 2, 1), np.uint8)
    experts[9, 1] = 1
    assert list(check_trace(npz(tmp_path / "a.npz", experts=experts))) == []


def claiming(shape: tuple[int, ...], dtype: str = "<i8") -> bytes:
    """Give an array file that claims a shape and holds 80 bytes."""
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": dtype, "fortran_order": False, "shape": shape})
    return file.getvalue() + b"\0" * 80


@pytest.mark.parametrize("shape", [(10**9, 10**3, 8), (10**30,), (11,), (9,)])
def test_a_file_that_claims_another_size_is_refused_without_allocating_it(tmp_path, shape) -> None:
    file = npz(tmp_path / "a.npz")
    with zipfile.ZipFile(file, "a") as archive:
        archive.writestr("token_ids.npy", claiming(shape))
    tracemalloc.start()
    try:
        refused(file, "token_ids.npy claims")
        assert tracemalloc.get_traced_memory()[1] < 50 * 2**20
    finally:
        tracemalloc.stop()


def test_a_file_with_python_objects_is_not_opened(tmp_path) -> None:
    ran = tmp_path / "ran"

    class Hostile:
        def __reduce__(self) -> tuple:
            return (Path.touch, (ran,))

    file = npz(tmp_path / "a.npz", category=np.array([Hostile(), Hostile()], dtype=object))
    refused(file, "is no readable .npz trace")
    with zipfile.ZipFile(file, "a") as archive:  # an object array under a plain dtype's name is bytes, nothing more
        archive.writestr("note.npy", claiming((10,), "|O"))
    refused(file, "is no readable .npz trace")
    assert not ran.exists()


def test_scores_are_held_to_the_header_and_the_ids(tmp_path) -> None:
    topology = MoeTopology.uniform(2, 8, 2)
    scores = np.random.default_rng(0).normal(size=(6, 2, 8)).astype(np.float32)
    experts = np.argsort(-scores)[..., :2].reshape(6, 4)
    row = SequenceRouting(sequence="a", experts=experts, scores=scores.reshape(6, 16))
    header = TraceHeader(topology=topology, scores="selection")
    with TraceWriter(tmp_path / "t", header) as writer:
        for reason, bad in [
            ("has no scores, the header declares 'selection'", replace(row, scores=None)),
            (r"its scores are \(6, 15\), expected \(6, 16\)", replace(row, scores=row.scores[:, 1:])),
            ("its scores are no numbers at token 3", replace(row, scores=spoiled(row.scores, 3, 5, np.nan))),
            (
                r"experts \[\d, \d\] at token 2, MoE layer 1, are not those with the largest scores",
                replace(row, scores=spoiled(row.scores, 2, 8 + (int(experts[2, 2]) + 1) % 8, 50.0, 51.0)),
            ),
        ]:
            with pytest.raises(TraceError, match=reason):
                writer.write(bad)
        writer.write(row)
        dropped = replace(row, sequence="dropped", experts=experts.copy())
        dropped.experts[:, 1] = -1  # what was not run says nothing
        writer.write(dropped)
        closed = replace(row, sequence="closed", scores=np.where(row.scores < -1, -np.inf, row.scores))
        writer.write(closed)  # a family closes groups of experts by minus infinity
        tied = np.zeros_like(row.scores)
        writer.write(replace(row, sequence="tied", scores=tied))  # among equal scores any may be chosen
        writer.write(replace(row, sequence="wide", scores=row.scores.astype(np.float64)))
    rows = list(Trace.open(tmp_path / "t"))
    assert [row.sequence for row in rows] == ["a", "dropped", "closed", "tied", "wide"]
    np.testing.assert_array_equal(rows[0].scores, row.scores)
    assert {row.scores.dtype for row in rows} == {np.dtype(np.float32)}
    assert list(check_trace(tmp_path / "t")) == []
    shard = next((tmp_path / "t").glob("shard-*"))
    pq.write_table(table_of([row, replace(row, sequence="b", scores=-row.scores)], scores=True), shard)
    (problem,) = check_trace(tmp_path / "t")
    assert (problem.row, "are not those with the largest scores" in problem.reason) == (1, True)
    pq.write_table(table_of([replace(row, scores=row.scores[:, :-1])], scores=True), shard)
    refused(tmp_path / "t", "row 0: its scores are not 16 per token, it has 6 tokens")
    change(tmp_path / "t", scores="")
    pq.write_table(table_of([row], scores=True), shard)
    assert [problem.reason for problem in check_trace(tmp_path / "t")] == ["it has scores, the header declares none"]


def spoiled(scores: np.ndarray, token: int, column: int, *values: float) -> np.ndarray:
    changed = scores.copy()
    for index, value in enumerate(values):
        changed[token, (column + index - 8) % 8 + 8 if column >= 8 else column] = value
    return changed


@pytest.mark.parametrize("name", ["cut", "nowhere", "notes.txt"])
def test_merge_fails_in_one_sentence_and_leaves_nothing(path, tmp_path, capsys, monkeypatch, name) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").write_text("words")
    (tmp_path / "cut").mkdir()
    for file in path.iterdir():
        (tmp_path / "cut" / file.name).write_bytes(file.read_bytes()[: -30 if file.suffix == ".parquet" else None])
    before = sorted(tmp_path.rglob("*"))
    assert main(["merge", "t", name, "--out", "out"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("foregate merge: ")
    assert name in err
    assert sorted(tmp_path.rglob("*")) == before


def test_merge_prints_what_it_made(path, tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["merge", "t", "--out", "one", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "trace": "one",
        "sequences": 3,
        "tokens": 15,
        "shards": 1,
        "sources": 1,
    }
    assert main(["merge", "t", "--out", "two"]) == 0
    assert capsys.readouterr().out == "two: 3 sequences, 15 tokens in 1 shards, from 1 traces\n"
    assert main(["merge", "t", "--out", "two"]) == 2
    assert main(["merge", "--out", "three"]) == 2


def test_a_footer_in_which_a_column_was_renamed_or_has_another_type(path, make_row) -> None:
    shard, table = next(path.glob("shard-*")), table_of([make_row("s0")])
    for name, kind in [("sequence", pa.binary()), ("prompt_tokens", pa.date32()), ("token_ids", pa.list_(pa.uint32()))]:
        index = table.column_names.index(name)
        pq.write_table(table.set_column(index, name, table.column(name).cast(kind)), shard)
        refused(path, f"{shard} is damaged (its column {name!r} holds ")
    for name in ("group", "weights"):
        renamed = table.rename_columns([f"x{item}" if item == name else item for item in table.column_names])
        pq.write_table(renamed.replace_schema_metadata(table.schema.metadata), shard)
        refused(path, f"{shard} lacks the column {name!r}")
    wide = pa.array(table.column("experts").to_pylist(), pa.large_list(pa.int64()))
    index = table.column_names.index("experts")
    pq.write_table(table.set_column(index, "experts", wide), shard)  # as another tool may have written it again
    assert list(check_trace(path)) == []
