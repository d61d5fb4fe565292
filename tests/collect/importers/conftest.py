"""Importing a source in a test: the result is opened, validated, and its counts are held to each other."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from foregate.collect.checks import check_trace
from foregate.collect.importers.config import ImportConfig
from foregate.collect.importing import ImportResult, import_source
from foregate.collect.load_table import LoadTable
from foregate.collect.sequence import SequenceRouting
from foregate.collect.trace import Trace


class Imported(NamedTuple):
    """Hold what an import gave."""

    result: ImportResult
    rows: dict[str, SequenceRouting]
    """Whole sequences by name; empty for a load table."""

    @property
    def dropped(self) -> dict[str, int]:
        """Rows dropped by reason."""
        return dict(self.result.report.rows_dropped)

    def layer(self, sequence: str, layer: int) -> list[list[int]]:
        """Give the ids of one MoE layer, token by token."""
        topology = Trace.open(self.result.out).topology
        return self.rows[sequence].layer_experts(topology)[layer].tolist()


Import = Callable[..., Imported]


@pytest.fixture
def imported(tmp_path: Path) -> Import:
    """Give `imported(source, **options)`."""
    count = 0

    def run(source: Path, **options: Any) -> Imported:
        nonlocal count
        count += 1
        out = tmp_path / f"imported-{count}"
        result = import_source(ImportConfig(source=str(source), out=str(out), **options))
        report = result.report
        assert report.rows_read == report.rows_kept + sum(report.rows_dropped.values())
        if result.kind == "load":
            assert not list(LoadTable.open(out).problems())
            return Imported(result, {})
        assert [str(problem) for problem in check_trace(out)] == []
        rows = {row.sequence: row for row in Trace.open(out).sequences()}
        assert (len(rows), sum(row.num_tokens for row in rows.values())) == (result.sequences, result.tokens)
        return Imported(result, rows)

    return run


Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Give `write(name, content)`: objects become JSON lines, texts and bytes stay; .gz is packed."""

    def make(name: str, content: list[dict[str, Any]] | str | bytes) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, list):
            content = "".join(json.dumps(value) + "\n" for value in content)
        data = content.encode() if isinstance(content, str) else content
        path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
        return path

    return make
