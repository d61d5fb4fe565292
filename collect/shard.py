"""Rows of a routing trace and the Parquet shards that hold them. Knows Parquet and NumPy, no headers or models.

One row is one sequence in one stack, or one part of it: sequences over PART_TOKENS tokens continue in the next part.
Reading streams: one row group is in memory at a time, and the arrays of its rows are views on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from .errors import TraceError
from .topology import MoeTopology, Stack

PART_TOKENS = 4096  # so that a row stays a few hundred KiB

SCHEMA = pa.schema(
    [
        pa.field("sequence", pa.string(), nullable=False),
        pa.field("part", pa.int32(), nullable=False),
        pa.field("group", pa.string()),
        pa.field("category", pa.string()),
        pa.field("stack", pa.string(), nullable=False),
        pa.field("source", pa.string()),
        pa.field("prompt_tokens", pa.int32()),
        pa.field("token_ids", pa.list_(pa.int32())),
        pa.field("experts", pa.list_(pa.int16()), nullable=False),
        pa.field("weights", pa.list_(pa.float16())),
    ]
)
TEXT_FIELD = pa.field("text", pa.string())  # optional columns, written only when asked for
SCORES_FIELD = pa.field("scores", pa.list_(pa.float32()))

# What a reader or a check does with a row that does not fit: (row index, reason)
Report = Callable[[int, str], None]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SequenceRouting:
    """Hold the routing of one sequence (or one part of it) in one stack."""

    sequence: str
    """Id, unique in the trace."""
    experts: np.ndarray
    """int16 [T, sum of k over the stack's layers], router order, logical ids, -1 = dropped or absent."""
    token_ids: np.ndarray | None = None
    """int32 [T]; None where an import has no tokens."""
    weights: np.ndarray | None = None
    """float16, shape of experts."""
    stack: Stack = "causal"
    part: int = 0
    group: str | None = None
    """What must not be split between training and test: conversation, document, template."""
    category: str | None = None
    source: str | None = None
    prompt_tokens: int | None = None
    """How many of the sequence's tokens were the prompt."""
    scores: np.ndarray | None = None
    """float32 [T, sum of num_experts over the stack's layers]: what the top-k chose from, only where asked for."""
    text: str | None = None
    """The text itself, only where it was asked for."""

    @property
    def num_tokens(self) -> int:
        """Tokens of this row."""
        return len(self.experts)

    def layer_experts(self, topology: MoeTopology) -> list[np.ndarray]:
        """Split the columns: one int16 [T, k] view per MoE layer of the row's stack."""
        bounds = np.cumsum([0] + [topology.layers[i].top_k for i in topology.layers_of(self.stack)])
        return [self.experts[:, a:b] for a, b in pairwise(bounds)]


def row_widths(topology: MoeTopology) -> dict[Stack, int]:
    """Give the columns of a row by stack: the sum of k over the stack's MoE layers."""
    return {stack: sum(topology.layers[i].top_k for i in topology.layers_of(stack)) for stack in topology.stacks}


def score_widths(topology: MoeTopology) -> dict[Stack, int]:
    """Give the columns of a row's scores by stack: the sum of num_experts over the stack's MoE layers."""
    return {stack: sum(topology.layers[i].num_experts for i in topology.layers_of(stack)) for stack in topology.stacks}


def stored(row: SequenceRouting) -> SequenceRouting:
    """Give a row with its arrays in the dtypes of the schema; what does not fit is left as it is, for the checks.

    Weights beyond float16 become infinite, which the checks refuse.
    """

    def fit(values: np.ndarray | None, dtype: type[np.integer]) -> np.ndarray | None:
        if values is None or values.dtype == dtype or values.dtype.kind not in "iu":
            return values
        legal = np.iinfo(dtype)
        inside = not values.size or (legal.min <= int(values.min()) and int(values.max()) <= legal.max)
        return values.astype(dtype) if inside else values

    def narrow(values: np.ndarray | None, dtype: type[np.floating]) -> np.ndarray | None:
        with np.errstate(over="ignore"):
            return None if values is None else values.astype(dtype, copy=False)

    experts = fit(row.experts, np.int16)
    assert experts is not None
    return replace(
        row,
        experts=experts,
        token_ids=fit(row.token_ids, np.int32),
        weights=narrow(row.weights, np.float16),
        scores=narrow(row.scores, np.float32),
    )


def split_parts(row: SequenceRouting) -> list[SequenceRouting]:
    """Cut a row into parts of at most PART_TOKENS tokens, as views; the first keeps the row's part number and text."""
    if row.num_tokens <= PART_TOKENS:
        return [row]
    parts = []
    for number, start in enumerate(range(0, row.num_tokens, PART_TOKENS)):
        cut = slice(start, start + PART_TOKENS)
        parts.append(
            replace(
                row,
                part=row.part + number,
                experts=row.experts[cut],
                token_ids=None if row.token_ids is None else row.token_ids[cut],
                weights=None if row.weights is None else row.weights[cut],
                scores=None if row.scores is None else row.scores[cut],
                text=row.text if number == 0 else None,
            )
        )
    return parts


def join_parts(rows: Iterable[SequenceRouting]) -> Iterator[SequenceRouting]:
    """Join each sequence's parts into one row; at most one sequence is held at a time.

    Raises:
        TraceError: if a part is missing or out of order.
    """
    held: list[SequenceRouting] = []
    for row in rows:
        follows = bool(held) and (row.sequence, row.stack) == (held[0].sequence, held[0].stack)
        if held and not (follows and row.part == held[-1].part + 1):
            yield _joined(held)
            held = []
        if not held and row.part != 0:
            raise TraceError(
                f"Part {row.part} of sequence {row.sequence!r} ({row.stack}) does not follow part {row.part - 1}; "
                "record or import the trace again."
            )
        held.append(row)
    if held:
        yield _joined(held)


def table_of(rows: Sequence[SequenceRouting], *, text: bool = False, scores: bool = False) -> pa.Table:
    """Put rows into one Arrow table of the trace schema, with the columns of texts and scores where asked for."""
    schema = SCHEMA
    for wanted, optional in ((text, TEXT_FIELD), (scores, SCORES_FIELD)):
        schema = schema.append(optional) if wanted else schema
    columns = []
    for field in schema:
        values = [getattr(row, field.name) for row in rows]
        columns.append(
            _list_column(values, field.type) if pa.types.is_list(field.type) else pa.array(values, field.type)
        )
    return pa.Table.from_arrays(columns, schema=schema)


def read_shard(path: Path, topology: MoeTopology, report: Report | None = None) -> Iterator[SequenceRouting]:
    """Iterate over the rows of one Parquet shard.

    Args:
        path: of the shard.
        topology: of the trace.
        report: called with (row index, reason) for a row that does not fit, which is then left out, instead of raising.

    Raises:
        TraceError: if the shard is damaged or lacks a column, or, without `report`, a row does not fit the topology.
    """
    widths = row_widths(topology)
    first = 0
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            missing = [name for name in ("sequence", "stack", "experts") if name not in file.schema_arrow.names]
            if missing:
                raise TraceError(f"{path} lacks the column {missing[0]!r} of a routing trace; record it again.")
            for group in range(file.num_row_groups):
                table = file.read_row_group(group)
                yield from _rows(table, widths, first, report or _refuse(path))
                first += table.num_rows
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise TraceError(f"{path} is damaged ({error}); delete this shard or record the trace again.") from error


def _refuse(path: Path) -> Report:
    def refuse(row: int, reason: str) -> None:
        raise TraceError(f"{path}, row {row}: {reason}; record or import the trace again.")

    return refuse


def _rows(table: pa.Table, widths: dict[Stack, int], first: int, report: Report) -> Iterator[SequenceRouting]:
    names = [*(field.name for field in SCHEMA if not pa.types.is_list(field.type)), TEXT_FIELD.name]
    plain = {name: _plain(table, name) for name in names}
    experts, token_ids, weights = (_lists(table, name) for name in ("experts", "token_ids", "weights"))
    for index in range(table.num_rows):
        stack, flat = plain["stack"][index], experts[index]
        if stack not in widths:
            report(first + index, f"its stack is {stack!r}, the topology has only {', '.join(widths)}")
            continue
        width = widths[stack]
        num_tokens = -1 if flat is None else len(flat) // width
        if flat is None or num_tokens * width != len(flat):
            report(first + index, f"its experts are no multiple of {width} per token")
            continue
        ids, scores = token_ids[index], weights[index]
        if ids is not None and len(ids) != num_tokens:
            report(first + index, f"it lists {len(ids)} token ids and experts for {num_tokens} tokens")
            continue
        if scores is not None and len(scores) != len(flat):
            report(first + index, f"it lists {len(scores)} weights and {len(flat)} experts")
            continue
        yield SequenceRouting(
            sequence=plain["sequence"][index],
            part=plain["part"][index] or 0,
            group=plain["group"][index],
            category=plain["category"][index],
            stack=cast(Stack, stack),
            source=plain["source"][index],
            prompt_tokens=plain["prompt_tokens"][index],
            token_ids=ids,
            experts=flat.reshape(num_tokens, width),
            weights=None if scores is None else scores.reshape(num_tokens, width),
            text=plain["text"][index],
        )


def _plain(table: pa.Table, name: str) -> list[Any]:
    return table.column(name).to_pylist() if name in table.column_names else [None] * table.num_rows


def _lists(table: pa.Table, name: str) -> list[np.ndarray | None]:
    """Give a list column as one array per row, None for null; other list types are cast, with an error on overflow."""
    if name not in table.column_names:
        return [None] * table.num_rows
    column = table.column(name).cast(SCHEMA.field(name).type).combine_chunks()
    chunks = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
    found: list[np.ndarray | None] = []
    for chunk in chunks:
        if chunk.values.null_count:
            raise pa.ArrowInvalid(f"column {name} has nulls inside its lists")
        values, bounds = chunk.values.to_numpy(zero_copy_only=False), chunk.offsets.to_pylist()
        valid = chunk.is_valid().to_pylist()
        found += [values[a:b] if known else None for known, (a, b) in zip(valid, pairwise(bounds), strict=True)]
    return found


def _list_column(values: list[np.ndarray | None], kind: pa.ListType) -> pa.Array:
    """Build a list column from arrays without going through Python numbers."""
    dtype = kind.value_type.to_pandas_dtype()
    lengths = [0 if value is None else value.size for value in values]
    offsets = np.zeros(len(values) + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    known = [np.asarray(value, dtype).reshape(-1) for value in values if value is not None]
    flat = pa.array(np.concatenate(known) if known else np.zeros(0, dtype), kind.value_type)
    mask = pa.array([value is None for value in values], pa.bool_())
    return pa.ListArray.from_arrays(pa.array(offsets), flat, type=kind, mask=mask)


def _joined(rows: list[SequenceRouting]) -> SequenceRouting:
    if len(rows) == 1:
        return rows[0]

    def together(name: str) -> np.ndarray | None:
        values = [getattr(row, name) for row in rows]
        return None if any(value is None for value in values) else np.concatenate(values)

    experts = together("experts")
    assert experts is not None
    others = {name: together(name) for name in ("token_ids", "weights", "scores")}
    return replace(rows[0], experts=experts, **others)  # type: ignore[arg-type]
