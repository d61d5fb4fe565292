"""Routing traces, format v1: one row per sequence, stack and part. Knows Parquet and NumPy, no tensors or models.

A trace is a folder of Parquet shards beside one trace.json, or one `.npz` file (arrays experts [tokens, layers, k],
offsets, and optionally weights, token_ids, prompt_len). Reading streams: one row group is in memory at a time.

Worked example: a model with 2 causal MoE layers, top-2, and a sequence of 3 tokens is one row with token_ids of
length 3 and experts [3, 4]: columns 0..1 are layer 0 in router order, columns 2..3 are layer 1; -1 = dropped.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from .errors import SettingError, TraceError
from .topology import MoeTopology, Stack

FORMAT_VERSION = 1
HEADER_NAME = "trace.json"
PART_TOKENS = 4096  # longer sequences continue in the next part, so that a row stays a few hundred KiB

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


@dataclass(frozen=True, kw_only=True)
class TraceHeader:
    """Hold what trace.json says of a whole trace."""

    topology: MoeTopology
    """MoE layers that the rows' columns follow."""
    model: str = ""
    """Name of the model, for people."""
    model_fingerprint: str = ""
    """Fingerprint of the model's config; empty where an import does not know it."""
    tokenizer_fingerprint: str = ""
    """Fingerprint of the tokenizer; empty where unknown."""
    vocab_size: int | None = None
    """Rows of the token embedding; None where unknown."""
    dtype: str = ""
    """Dtype that the model ran in."""
    versions: dict[str, str] = field(default_factory=dict)
    """Library versions at recording."""
    generation: dict[str, Any] = field(default_factory=dict)
    """Generation settings, empty for a plain forward."""
    seed: int | None = None
    """Seed of the recording run."""

    def to_json(self) -> dict[str, Any]:
        """Give the header as plain JSON values."""
        values = {item.name: getattr(self, item.name) for item in fields(self) if item.name != "topology"}
        return {"format_version": FORMAT_VERSION, **values, "topology": self.topology.to_json()}

    @classmethod
    def from_json(cls, value: dict[str, Any], where: str = HEADER_NAME) -> TraceHeader:
        """Read what `to_json` gave.

        Raises:
            TraceError: if the version differs or the value is no header.
        """
        if not isinstance(value, dict) or "topology" not in value:
            raise TraceError(
                f"{where} is no trace header; expected an object with 'topology', written by foregate collect."
            )
        version = value.get("format_version")
        if version != FORMAT_VERSION:
            raise TraceError(
                f"{where} has format version {version!r}; this foregate reads version {FORMAT_VERSION}: "
                "record or import the trace again."
            )
        known = {name: value[name] for name in cls.__dataclass_fields__ if name in value and name != "topology"}
        try:
            return cls(topology=MoeTopology.from_json(value["topology"]), **known)
        except SettingError as error:
            raise TraceError(f"{where} has no usable topology: {error}") from error


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

    @property
    def num_tokens(self) -> int:
        """Tokens of this row."""
        return len(self.experts)

    def layer_experts(self, topology: MoeTopology) -> list[np.ndarray]:
        """Split the columns: one int16 [T, k] view per MoE layer of the row's stack."""
        bounds = np.cumsum([0] + [topology.layers[i].top_k for i in topology.layers_of(self.stack)])
        return [self.experts[:, a:b] for a, b in pairwise(bounds)]


class Trace:
    """Read a trace; iterate to get its rows as `SequenceRouting`, shard by shard, parts in order."""

    def __init__(self, path: Path, header: TraceHeader, shards: list[Path]) -> None:
        self.path, self.header, self.shards = path, header, shards

    @property
    def topology(self) -> MoeTopology:
        """The trace's MoE layers."""
        return self.header.topology

    @classmethod
    def open(cls, path: str | Path) -> Trace:
        """Open a trace folder or an `.npz` file.

        Raises:
            TraceError: if the path is missing, no trace, or of another format version.
        """
        path = Path(path)
        if path.suffix == ".npz":
            from .npz import NpzTrace  # only readers of .npz pay for it

            return NpzTrace.open(path)
        header_path = path / HEADER_NAME
        if not header_path.is_file():
            raise TraceError(
                f"{path} is no routing trace: it has no {HEADER_NAME}; give a folder written by foregate collect or "
                "foregate import, or an .npz file."
            )
        try:
            value = json.loads(header_path.read_text(encoding="utf-8"))
        except (UnicodeDecodeError, json.JSONDecodeError) as error:
            raise TraceError(
                f"{header_path} is not readable JSON ({error}); record or import the trace again."
            ) from error
        return cls(path, TraceHeader.from_json(value, str(header_path)), sorted(path.glob("shard-*.parquet")))

    def __iter__(self) -> Iterator[SequenceRouting]:
        for shard in self.shards:
            yield from read_shard(shard, self.topology)

    def rows(self, stack: Stack) -> Iterator[SequenceRouting]:
        """Iterate over the rows of one stack."""
        return (row for row in self if row.stack == stack)


def read_shard(path: Path, topology: MoeTopology) -> Iterator[SequenceRouting]:
    """Iterate over the rows of one Parquet shard.

    Raises:
        TraceError: if the shard is damaged, lacks a column, or a row does not fit the topology.
    """
    widths = {stack: sum(topology.layers[i].top_k for i in topology.layers_of(stack)) for stack in topology.stacks}
    try:
        file = pq.ParquetFile(path)
        missing = [name for name in ("sequence", "stack", "experts") if name not in file.schema_arrow.names]
        if missing:
            raise TraceError(
                f"{path} lacks the column {missing[0]!r} of trace format v{FORMAT_VERSION}; record it again."
            )
        for group in range(file.num_row_groups):
            table = file.read_row_group(group)
            for index in range(table.num_rows):
                yield _row(table, index, widths, f"{path}, row {index}")
    except (pa.ArrowException, OSError) as error:
        raise TraceError(f"{path} is damaged ({error}); delete this shard or record the trace again.") from error


def _row(table: pa.Table, index: int, widths: Mapping[Stack, int], where: str) -> SequenceRouting:
    def scalar(name: str) -> Any:
        return table.column(name)[index].as_py() if name in table.column_names else None

    def array(name: str, dtype: Any) -> np.ndarray | None:
        if name not in table.column_names:
            return None
        values = table.column(name)[index].values
        return None if values is None else values.to_numpy(zero_copy_only=False).astype(dtype, copy=False)

    stack = scalar("stack")
    width = widths.get(stack)
    if width is None:
        raise TraceError(f"{where} has stack {stack!r}; its topology has only {', '.join(widths)}.")
    flat = array("experts", np.int16)
    token_ids, weights = array("token_ids", np.int32), array("weights", np.float16)
    num_tokens = 0 if flat is None else len(flat) // width
    if (
        flat is None
        or num_tokens * width != len(flat)
        or (token_ids is not None and len(token_ids) != num_tokens)
        or (weights is not None and len(weights) != len(flat))
    ):
        raise TraceError(
            f"{where} does not hold {width} experts per token for the tokens it lists; record or import it again."
        )
    return SequenceRouting(
        sequence=scalar("sequence"),
        part=scalar("part") or 0,
        group=scalar("group"),
        category=scalar("category"),
        stack=stack,
        source=scalar("source"),
        prompt_tokens=scalar("prompt_tokens"),
        token_ids=token_ids,
        experts=flat.reshape(num_tokens, width),
        weights=None if weights is None else weights.reshape(num_tokens, width),
    )
