"""Load tables: what is written comes back, and what does not fit is refused or reported."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from foregate.collect.checks import check_trace
from foregate.collect.errors import SettingError, TraceError
from foregate.collect.load_table import LoadHeader, LoadLayer, LoadRow, LoadTable, write_load_table
from foregate.collect.topology import Stack

LAYERS = (
    LoadLayer(stack="encoder", block=1, num_experts=3, top_k=1),
    LoadLayer(stack="decoder", block=1, num_experts=2),
)
HEADER = LoadHeader(runs={"a": LAYERS, "b": LAYERS[1:]}, model="m", recording={"format": "f"})


def row(run: str, layer: int, batch: int, counts: list[int], stack: Stack = "encoder") -> LoadRow:
    """Make a row."""
    return LoadRow(run=run, stack=stack, layer=layer, batch=batch, counts=np.array(counts, np.int64))


ROWS = [row("a", 0, 7, [3, 0, 6]), row("a", 1, 7, [2**40, 1], "decoder"), row("b", 0, -1, [0, 0], "decoder")]


def test_rows_and_header_come_back(tmp_path: Path) -> None:
    assert write_load_table(tmp_path, HEADER, iter(ROWS)) == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["load.json", "load.parquet"]
    table = LoadTable.open(tmp_path)
    assert table.header == HEADER
    found = [(item.run, item.stack, item.layer, item.batch, item.counts.tolist()) for item in table]
    assert found == [(item.run, item.stack, item.layer, item.batch, item.counts.tolist()) for item in ROWS]
    assert list(table.problems()) == []


WRONG = {
    "a count whose sums could wrap": (row("a", 0, 1, [1, 2**40 + 1, 3]), "expert 1 has the count 1099511627777, legal"),
    "an unknown run": (row("c", 0, 1, [1, 2, 3]), "its run is 'c', the header has only a, b"),
    "an unknown layer": (row("a", 2, 1, [1, 2, 3]), "its layer is 2, run 'a' has layers 0..1"),
    "another stack": (row("a", 0, 1, [1, 2, 3], "causal"), "its stack is 'causal'"),
    "other experts": (row("a", 0, 1, [1, 2]), "it has 2 counts, the layer has 3 experts"),
    "a count below 0": (row("a", 0, 1, [1, -2, 3]), "expert 1 has the count -2"),
    "a row twice": (ROWS[0], "it stands twice"),
}


@pytest.mark.parametrize("name", WRONG)
def test_rows_that_do_not_fit_are_refused_and_nothing_is_left(name: str, tmp_path: Path) -> None:
    wrong, message = WRONG[name]
    with pytest.raises(TraceError, match=message):
        write_load_table(tmp_path, HEADER, [*ROWS, wrong])
    assert not list(tmp_path.iterdir())


def test_counts_of_zero_are_the_recording_of_nothing(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="All counts are 0"):
        write_load_table(tmp_path, HEADER, [row("a", 0, 1, [0, 0, 0])])
    assert not list(tmp_path.iterdir())


def test_problems_of_a_table_on_disk_are_reported_with_their_row(tmp_path: Path) -> None:
    write_load_table(tmp_path, HEADER, ROWS)
    other = LoadHeader(runs={"a": (LAYERS[0], LoadLayer(stack="decoder", block=1, num_experts=5))})
    (tmp_path / "load.json").write_text(json.dumps(other.to_json()), encoding="utf-8")
    assert [index for index, _ in LoadTable.open(tmp_path).problems()] == [1, 2]


def test_other_versions_and_damage_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="is no load table"):
        LoadTable.open(tmp_path)
    write_load_table(tmp_path, HEADER, ROWS)
    (tmp_path / "load.parquet").write_bytes((tmp_path / "load.parquet").read_bytes()[:-30])
    with pytest.raises(TraceError, match=r"load.parquet is damaged"):
        list(LoadTable.open(tmp_path))
    for text, message in (
        ("{", "is no load table"),
        ("[" * 100_000, "is no load table"),
        ("[]", "format version None"),
        (json.dumps({**HEADER.to_json(), "format_version": 2}), "format version 2, legal is 1"),
        (json.dumps({"format_version": 1, "runs": {"a": [{"stack": "up"}]}}), "no header"),
    ):
        (tmp_path / "load.json").write_text(text, encoding="utf-8")
        with pytest.raises(TraceError, match=message):
            LoadTable.open(tmp_path)
    for values, message in (
        ({"block": 99_999, "num_experts": 1}, "block must lie in 0..16383, got 99999"),
        ({"block": "a", "num_experts": 1}, "block must lie in 0..16383, got 'a'"),
        ({"block": 0, "num_experts": 10**9}, "num_experts must lie in 1..32768, got 1000000000"),
        ({"block": 0, "num_experts": 2, "top_k": 3}, "top_k must lie in 1..2, got 3"),
    ):
        with pytest.raises(SettingError, match=message):
            LoadLayer(stack="causal", **values)
    with pytest.raises(SettingError, match="at least one run"):
        LoadHeader(runs={})
    with pytest.raises(SettingError, match="stack must be one of"):
        LoadLayer(stack="up", block=0, num_experts=1)  # type: ignore[arg-type]


def test_validate_checks_a_load_table_by_its_own_rules(tmp_path: Path) -> None:
    write_load_table(tmp_path, HEADER, iter(ROWS))
    assert list(check_trace(tmp_path)) == []
    values = json.loads((tmp_path / "load.json").read_text())
    values["runs"]["a"][0]["num_experts"] = 2
    (tmp_path / "load.json").write_text(json.dumps(values))
    (problem,) = check_trace(tmp_path)
    assert (problem.row, problem.reason) == (0, "it has 3 counts, the layer has 2 experts")
    (tmp_path / "load.parquet").write_bytes(b"PAR1")
    (problem,) = check_trace(tmp_path)
    assert problem.row is None
    assert "is damaged" in problem.reason


def test_columns_of_other_types_are_damage(tmp_path: Path) -> None:
    write_load_table(tmp_path, HEADER, ROWS)
    good = {"run": ["a"], "stack": ["encoder"], "layer": [0], "batch": [0]}
    for counts in (["a", "b", "c"], [None, 1, 2], None):
        pq.write_table(pa.table({**good, "counts": [counts]}), tmp_path / "load.parquet")
        with pytest.raises(TraceError, match=r"load.parquet is damaged"):
            list(LoadTable.open(tmp_path))
