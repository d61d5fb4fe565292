"""Parquet shards that hold the rows of a routing trace. Knows Parquet and NumPy, no headers or models.

Reading streams: one row group is in memory at a time, and the arrays of its rows are views on it. What is read fits the
topology: as many columns as it has, ids in range.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from .errors import TraceError
from .sequence import PART_TOKENS, SequenceRouting, StackColumns, columns_of, join_parts, split_parts, stored
from .staging import staged_file
from .topology import MoeTopology, Stack

__all__ = [
    "FORMAT_VERSION",
    "PART_TOKENS",
    "Report",
    "SequenceRouting",
    "join_parts",
    "read_shard",
    "split_parts",
    "stored",
    "table_of",
    "write_shard",
]

FORMAT_VERSION = 1
VERSION_KEY = b"foregate.format_version"  # in a shard's metadata, so that one that strayed into a folder is noticed

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
HIDDEN_FIELD = pa.field("hidden", pa.list_(pa.float16()))
MAX_ENTRIES = 2**31 - 1  # of a column in a row group: Arrow's lists count theirs in int32
OPTIONAL_LISTS = {field.name: field.type for field in (SCORES_FIELD, HIDDEN_FIELD)}
PLAIN = [field.name for field in SCHEMA if not pa.types.is_list(field.type)]
WRITING: dict[str, Any] = {
    "compression": "zstd",
    "write_page_checksum": True,
    # of token ids, weights and scores a dictionary saves nothing: 128 rows x 128 tokens are written in 7 ms, not in 10
    "use_dictionary": [*PLAIN, "experts.list.element"],
    "write_statistics": PLAIN,
}

# What a reader or a check does with a row that does not fit: (row index, reason)
Report = Callable[[int, str], None]


def table_of(
    rows: Sequence[SequenceRouting], *, text: bool = False, scores: bool = False, hidden: bool = False
) -> pa.Table:
    """Put rows into one Arrow table of the trace schema, with the optional columns that are asked for."""
    schema = SCHEMA
    for wanted, optional in ((text, TEXT_FIELD), (scores, SCORES_FIELD), (hidden, HIDDEN_FIELD)):
        schema = schema.append(optional) if wanted else schema
    columns = []
    for field in schema:
        values = [getattr(row, field.name) for row in rows]
        columns.append(
            _list_column(values, field.type) if pa.types.is_list(field.type) else pa.array(values, field.type)
        )
    return pa.Table.from_arrays(columns, schema=schema.with_metadata({VERSION_KEY: str(FORMAT_VERSION)}))


def write_shard(
    path: Path, rows: Sequence[SequenceRouting], *, text: bool = False, scores: bool = False, hidden: bool = False
) -> None:
    """Write rows as one Parquet shard, which appears whole or not at all.

    Raises:
        OSError: on a full disk, with the path filled in.
    """
    with staged_file(path) as file:
        table = table_of(rows, text=text, scores=scores, hidden=hidden)
        pq.write_table(table, file, row_group_size=len(rows), **WRITING)


def read_shard(path: Path, topology: MoeTopology, report: Report | None = None) -> Iterator[SequenceRouting]:
    """Iterate over the rows of one Parquet shard.

    Args:
        path: of the shard.
        topology: of the trace.
        report: called with (row index, reason) for a row that does not fit, which is then left out, instead of raising.

    Raises:
        TraceError: if the shard is damaged or lacks a column, or, without `report`, a row does not fit the topology.
    """
    columns, first = columns_of(topology), 0
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            _check_schema(path, file.schema_arrow)
            for group in range(file.num_row_groups):
                table = file.read_row_group(group)
                yield from _rows(table, columns, first, report or _refuse(path), strict=report is None)
                first += table.num_rows
            if first != file.metadata.num_rows:  # a damaged footer: row groups that lie about their rows
                raise TraceError(
                    f"{path} is damaged (it has {first} rows, its footer says {file.metadata.num_rows}); delete this "
                    "shard or record the trace again."
                )
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise TraceError(f"{path} is damaged ({error}); delete this shard or record the trace again.") from error


def _check_schema(path: Path, schema: pa.Schema) -> None:
    """Refuse another version, a missing column, and, in a shard of foregate's own, a column of another type.

    A Parquet file's footer has no checksum: there a damaged byte can rename a column or change its type.
    """
    own, version = VERSION_KEY in (schema.metadata or {}), str(FORMAT_VERSION).encode()
    found = (schema.metadata or {}).get(VERSION_KEY, version)
    if found != version:
        raise TraceError(
            f"{path} has format version {found.decode(errors='replace')!r}; this foregate reads version "
            f"{FORMAT_VERSION}: record or import the trace again."
        )
    for field in SCHEMA:
        if field.name not in schema.names:
            if own or field.name in ("sequence", "stack", "experts"):
                raise TraceError(f"{path} lacks the column {field.name!r} of a routing trace; record it again.")
            continue
        kind = schema.field(field.name).type
        rewritten = pa.types.is_large_list(kind) or pa.types.is_large_string(kind)  # by another tool; values are cast
        nested = pa.types.is_nested(kind) == pa.types.is_nested(field.type)
        if not nested or not (kind == field.type or rewritten or not own) or pa.types.is_binary(kind):
            raise TraceError(
                f"{path} is damaged (its column {field.name!r} holds {kind}, not {field.type}); delete this shard or "
                "record the trace again."
            )


def _refuse(path: Path) -> Report:
    def refuse(row: int, reason: str) -> None:
        raise TraceError(f"{path}, row {row}: {reason}; record or import the trace again.")

    return refuse


def _rows(
    table: pa.Table, columns: dict[Stack, StackColumns], first: int, report: Report, *, strict: bool
) -> Iterator[SequenceRouting]:
    names = [*(field.name for field in SCHEMA if not pa.types.is_list(field.type)), TEXT_FIELD.name]
    plain = {name: _plain(table, name) for name in names}
    experts, token_ids, weights, scores, hidden = (
        _lists(table, name) for name in ("experts", "token_ids", "weights", "scores", "hidden")
    )
    for index in range(table.num_rows):
        stack, flat = plain["stack"][index], experts[index]
        own = columns.get(stack)
        if own is None:
            report(first + index, f"its stack is {stack!r}, the topology has only {', '.join(columns)}")
            continue
        num_tokens = -1 if flat is None else len(flat) // own.width
        if flat is None or num_tokens * own.width != len(flat):
            report(first + index, f"its experts are no multiple of {own.width} per token")
            continue
        ids = token_ids[index]
        if ids is not None and len(ids) != num_tokens:
            report(first + index, f"it lists {len(ids)} token ids and experts for {num_tokens} tokens")
            continue
        floats = {
            "weights": (weights[index], own.width),
            "scores": (scores[index], own.score_width),
            "hidden": (hidden[index], own.hidden_width),
        }
        wrong = [
            name for name, (values, width) in floats.items() if values is not None and values.size != num_tokens * width
        ]
        if wrong:
            reason = f"its {wrong[0]} are not {floats[wrong[0]][1]} per token, it has {num_tokens} tokens"
            report(first + index, reason)
            continue
        row = SequenceRouting(
            sequence=plain["sequence"][index],
            part=plain["part"][index] or 0,
            group=plain["group"][index],
            category=plain["category"][index],
            stack=cast(Stack, stack),
            source=plain["source"][index],
            prompt_tokens=plain["prompt_tokens"][index],
            token_ids=ids,
            experts=flat.reshape(num_tokens, own.width),
            text=plain["text"][index],
            **{
                name: None if values is None else values.reshape(num_tokens, width)
                for name, (values, width) in floats.items()
            },
        )
        if strict and (reason := own.out_of_range(row.experts)):
            report(first + index, reason)
        yield row


def _plain(table: pa.Table, name: str) -> list[Any]:
    return table.column(name).to_pylist() if name in table.column_names else [None] * table.num_rows


def _lists(table: pa.Table, name: str) -> list[np.ndarray | None]:
    """Give a list column as one array per row, None for null; other list types are cast, with an error on overflow."""
    if name not in table.column_names:
        return [None] * table.num_rows
    column = table.column(name).cast(_type_of(name)).combine_chunks()
    chunks = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
    found: list[np.ndarray | None] = []
    for chunk in chunks:
        if chunk.values.null_count:
            raise pa.ArrowInvalid(f"column {name} has nulls inside its lists")
        values, bounds = chunk.values.to_numpy(zero_copy_only=False), chunk.offsets.to_pylist()
        valid = chunk.is_valid().to_pylist()
        found += [values[a:b] if known else None for known, (a, b) in zip(valid, pairwise(bounds), strict=True)]
    return found


def _type_of(name: str) -> pa.DataType:
    return OPTIONAL_LISTS.get(name) or SCHEMA.field(name).type


def _list_column(values: list[np.ndarray | None], kind: pa.ListType) -> pa.Array:
    """Build a list column from arrays without going through Python numbers."""
    dtype = kind.value_type.to_pandas_dtype()
    lengths = [0 if value is None else value.size for value in values]
    if sum(lengths) > MAX_ENTRIES:
        raise TraceError(
            f"A column of {sum(lengths)} entries does not fit a shard, at most {MAX_ENTRIES} do; record shorter "
            "sequences, or without hidden states."
        )
    offsets = np.zeros(len(values) + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    known = [np.asarray(value, dtype).reshape(-1) for value in values if value is not None]
    flat = pa.array(np.concatenate(known) if known else np.zeros(0, dtype), kind.value_type)
    mask = pa.array([value is None for value in values], pa.bool_())
    return pa.ListArray.from_arrays(pa.array(offsets), flat, type=kind, mask=mask)
