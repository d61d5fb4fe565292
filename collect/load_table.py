"""Load tables: how many tokens each expert got, per layer and batch. Knows Parquet and counts, no tokens or models.

A load table is a folder with load.json (format version, runs and their layers) and load.parquet (one row per run,
stack, MoE layer and batch). Some tools count instead of logging choices: that is enough for load balance, replication
and popularity, and for nothing that follows a token.

Worked example: a run with one MoE layer of 4 experts, top-1, and a batch of 10 tokens is a row whose counts are
[3, 0, 6, 1]. Where experts drop what exceeds their capacity, counts sum to less than the tokens.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from .errors import SettingError, TraceError
from .staging import staged_file
from .topology import STACKS, Stack
from .trace import MAX_EXPERTS, MAX_LAYERS

FORMAT_VERSION = 1
HEADER_NAME, TABLE_NAME = "load.json", "load.parquet"
MOST_TOKENS = 2**40  # of one expert in one batch: sums over 2^15 experts and many batches stay below 2^63
ROW_GROUP = 4096  # rows; of 256 experts that is 8 MiB

SCHEMA = pa.schema(
    [
        pa.field("run", pa.string(), nullable=False),
        pa.field("stack", pa.string(), nullable=False),
        pa.field("layer", pa.int32(), nullable=False),
        pa.field("batch", pa.int64(), nullable=False),
        pa.field("counts", pa.list_(pa.int64()), nullable=False),
    ]
)


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadLayer:
    """Describe one MoE layer of a run."""

    stack: Stack
    """Which stack of the model the layer stands in."""
    block: int
    """Index of its block inside that stack."""
    num_experts: int
    """Routed experts of the layer."""
    top_k: int | None = None
    """Experts that each token chooses; None where unknown."""

    def __post_init__(self) -> None:
        if self.stack not in STACKS:
            raise SettingError(f"stack must be one of {', '.join(STACKS)}, got {self.stack!r}.")
        if type(self.block) is not int or not 0 <= self.block < MAX_LAYERS:
            raise SettingError(f"block must lie in 0..{MAX_LAYERS - 1}, got {self.block!r}.")
        if type(self.num_experts) is not int or not 1 <= self.num_experts <= MAX_EXPERTS:
            raise SettingError(f"num_experts must lie in 1..{MAX_EXPERTS}, got {self.num_experts!r}.")
        if self.top_k is not None and (type(self.top_k) is not int or not 1 <= self.top_k <= self.num_experts):
            raise SettingError(f"top_k must lie in 1..{self.num_experts}, got {self.top_k!r} in block {self.block}.")


@dataclass(frozen=True, kw_only=True)
class LoadHeader:
    """Hold what load.json says."""

    runs: dict[str, tuple[LoadLayer, ...]]
    """MoE layers by run; the column `layer` is an index into a run's layers."""
    model: str = ""
    """Name of the model, for people."""
    recording: dict[str, Any] = field(default_factory=dict)
    """Where the counts come from."""

    def __post_init__(self) -> None:
        if not self.runs or not all(self.runs.values()):
            raise SettingError("A load table needs at least one run with at least one MoE layer.")

    def to_json(self) -> dict[str, Any]:
        """Give the header as plain JSON values."""
        names = list(LoadLayer.__dataclass_fields__)
        runs = {
            run: [{name: getattr(layer, name) for name in names} for layer in layers]
            for run, layers in self.runs.items()
        }
        return {"format_version": FORMAT_VERSION, "model": self.model, "recording": self.recording, "runs": runs}

    @classmethod
    def from_json(cls, value: Any, where: str) -> LoadHeader:
        """Read what `to_json` gave.

        Raises:
            TraceError: if the version differs or the value is no header.
        """
        version = value.get("format_version") if isinstance(value, dict) else None
        if version != FORMAT_VERSION:
            raise TraceError(f"{where} has format version {version!r}, legal is {FORMAT_VERSION}; import it again.")
        try:
            runs = {run: tuple(LoadLayer(**layer) for layer in layers) for run, layers in value["runs"].items()}
            return cls(runs=runs, model=value.get("model", ""), recording=value.get("recording", {}))
        except (AttributeError, KeyError, TypeError, SettingError) as error:
            raise TraceError(f"{where} is no header of a load table ({error}); import it again.") from error


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LoadRow:
    """Hold the counts of one MoE layer in one batch."""

    run: str
    stack: Stack
    layer: int
    """Index into the run's layers."""
    batch: int
    counts: np.ndarray
    """int64 [experts]."""


def check_row(header: LoadHeader, row: LoadRow) -> str | None:
    """Say what is wrong with a row, None where nothing is."""
    layers = header.runs.get(row.run)
    if layers is None:
        return f"its run is {row.run!r}, the header has only {', '.join(header.runs)}"
    if not 0 <= row.layer < len(layers):
        return f"its layer is {row.layer}, run {row.run!r} has layers 0..{len(layers) - 1}"
    layer = layers[row.layer]
    if row.stack != layer.stack:
        return f"its stack is {row.stack!r}, layer {row.layer} of run {row.run!r} stands in {layer.stack!r}"
    if row.counts.shape != (layer.num_experts,):
        return f"it has {row.counts.size} counts, the layer has {layer.num_experts} experts"
    wrong = np.flatnonzero((row.counts < 0) | (row.counts > MOST_TOKENS))
    if len(wrong):
        return f"expert {wrong[0]} has the count {row.counts[wrong[0]]}, legal is 0..{MOST_TOKENS}"
    return None


def write_load_table(folder: Path, header: LoadHeader, rows: Iterable[LoadRow]) -> int:
    """Write a load table into a folder that is there, and give its number of rows.

    Raises:
        TraceError: if a row does not fit the header or stands twice, there are none, or all counts are 0.
    """
    seen: set[tuple[str, int, int]] = set()
    held: list[LoadRow] = []
    total = 0
    with staged_file(folder / TABLE_NAME) as file, pq.ParquetWriter(file, SCHEMA, compression="zstd") as writer:
        for row in rows:
            reason = check_row(header, row)
            key = (row.run, row.layer, row.batch)
            if reason is None and key in seen:
                reason = "it stands twice"
            if reason is not None:
                raise TraceError(f"Run {row.run!r}, layer {row.layer}, batch {row.batch}: {reason}; mend the source.")
            seen.add(key)
            total += int(row.counts.sum())
            held.append(row)
            if len(held) == ROW_GROUP:
                writer.write_table(_table(held))
                held = []
        if held:
            writer.write_table(_table(held))
        if not total:
            raise TraceError("All counts are 0: the routers never ran, or were not recorded; record again.")
    with staged_file(folder / HEADER_NAME) as file:
        file.write(json.dumps(header.to_json(), indent=1).encode() + b"\n")
    return len(seen)


class LoadTable:
    """Read a load table; iterate to get its rows."""

    def __init__(self, path: Path, header: LoadHeader) -> None:
        self.path, self.header = path, header

    @classmethod
    def open(cls, path: str | Path) -> LoadTable:
        """Open a load table.

        Raises:
            TraceError: if the folder holds none, or one of another format version.
        """
        header = Path(path) / HEADER_NAME
        try:
            value = json.loads(header.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise TraceError(f"{path} is no load table ({error}); give a folder that foregate import wrote.") from error
        return cls(Path(path), LoadHeader.from_json(value, str(header)))

    def __iter__(self) -> Iterator[LoadRow]:
        path = self.path / TABLE_NAME
        try:
            with pq.ParquetFile(path) as file:
                for group in range(file.num_row_groups):
                    for values in file.read_row_group(group).to_pylist():
                        yield LoadRow(**{**values, "counts": np.asarray(values["counts"], np.int64)})
        except (pa.ArrowException, OSError, ValueError, TypeError, KeyError, OverflowError) as error:
            raise TraceError(f"{path} is damaged ({error}); import it again.") from error

    def problems(self) -> Iterator[tuple[int, str]]:
        """Yield (row index, reason) for every row that does not fit the header or stands twice."""
        seen: set[tuple[str, int, int]] = set()
        for index, row in enumerate(self):
            key = (row.run, row.layer, row.batch)
            reason = check_row(self.header, row) or ("it stands twice" if key in seen else None)
            seen.add(key)
            if reason is not None:
                yield index, reason


def _table(rows: list[LoadRow]) -> pa.Table:
    columns = [[getattr(row, name) for row in rows] for name in SCHEMA.names]
    return pa.Table.from_arrays(
        [pa.array(values, field.type) for values, field in zip(columns, SCHEMA, strict=True)], schema=SCHEMA
    )
