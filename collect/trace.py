"""Routing traces, format v1: one row per sequence, stack and part. Knows Parquet and NumPy, no tensors or models.

A trace is a folder of Parquet shards beside one trace.json, or one `.npz` file (arrays experts [tokens, layers, k],
offsets, and optionally weights, token_ids, prompt_len). Reading streams: one row group is in memory at a time.

Worked example: a model with 2 causal MoE layers, top-2, and a sequence of 3 tokens is one row with token_ids of
length 3 and experts [3, 4]: columns 0..1 are layer 0 in router order, columns 2..3 are layer 1; -1 = dropped.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args

from .errors import SettingError, TraceError
from .mistaken import why_no_trace
from .notes import Note, notes_from_json
from .sequence import PART_TOKENS, SequenceRouting, join_parts
from .shard import FORMAT_VERSION, read_shard
from .topology import MoeTopology, Stack

__all__ = ["FORMAT_VERSION", "HEADER_NAME", "ScoresKind", "SequenceRouting", "Trace", "TraceHeader", "WeightsKind"]

HEADER_NAME = "trace.json"
SHARD_GLOB = "shard-*.parquet"  # shard-RANK-NUMBER.parquet; the order of names is the order of the trace

MAX_HEADER_BYTES = 64 * 2**20
MAX_LAYERS, MAX_EXPERTS = 2**14, 2**15  # ids are int16; no model comes near
MAX_WIDTH = 2**31 // PART_TOKENS  # Arrow's lists count their entries in int32

# "": not declared; none: the rows have no weights; finite: any numbers; unit: each in 0..1; normalized: a token's
# weights in a layer are positive and sum to 1
WeightsKind = Literal["", "none", "finite", "unit", "normalized"]
# "": the rows have no scores; selection: the input of the top-k that gave the ids
ScoresKind = Literal["", "selection"]
# "": the rows have no hidden states; gates: what the gates of the routers saw
HiddenKind = Literal["", "gates"]


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
    weights: WeightsKind = ""
    """What the weights column holds; the checks hold the rows to it."""
    scores: ScoresKind = ""
    """What the scores column holds; the checks hold the rows to it. Empty where there is none."""
    hidden: HiddenKind = ""
    """What the column of hidden states holds; the checks hold the rows to it. Empty where there is none."""
    generation: dict[str, Any] = field(default_factory=dict)
    """Generation settings, empty for a plain forward."""
    recording: dict[str, Any] = field(default_factory=dict)
    """Data and lengths of the recording: what a resumed run must agree in."""
    seed: int | None = None
    """Seed of the recording run."""
    notes: tuple[Note, ...] = ()
    """What an import could not prove; empty for a recording of one's own."""

    def __post_init__(self) -> None:
        if self.weights not in get_args(WeightsKind):
            raise SettingError(f"weights must be one of {get_args(WeightsKind)}, got {self.weights!r}.")
        if self.scores not in get_args(ScoresKind):
            raise SettingError(f"scores must be one of {get_args(ScoresKind)}, got {self.scores!r}.")
        if self.hidden not in get_args(HiddenKind):
            raise SettingError(f"hidden must be one of {get_args(HiddenKind)}, got {self.hidden!r}.")

    def to_json(self) -> dict[str, Any]:
        """Give the header as plain JSON values."""
        plain = [item.name for item in fields(self) if item.name not in ("topology", "notes")]
        values = {name: getattr(self, name) for name in plain}
        notes = [note.to_json() for note in self.notes]
        return {"format_version": FORMAT_VERSION, **values, "notes": notes, "topology": self.topology.to_json()}

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
        apart = ("topology", "notes")
        known = {name: value[name] for name in cls.__dataclass_fields__ if name in value and name not in apart}
        try:
            _check_types(known)
            notes = notes_from_json(value.get("notes", []))
            header = cls(topology=MoeTopology.from_json(value["topology"]), notes=notes, **known)
            _check_limits(header.topology)
        except SettingError as error:
            raise TraceError(f"{where} is no usable header: {error}") from error
        return header


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
        if path.suffix == ".npz" and not path.is_dir():
            from .npz import NpzTrace  # only readers of .npz pay for it

            return NpzTrace.open(path)
        header_path = path / HEADER_NAME
        if not header_path.is_file():
            raise TraceError(f"{path} is no routing trace: {why_no_trace(path)}")
        try:
            size = header_path.stat().st_size
            if size > MAX_HEADER_BYTES:
                raise ValueError(f"{size} bytes, at most {MAX_HEADER_BYTES} are read")
            value = json.loads(header_path.read_text(encoding="utf-8"))
        except (
            ValueError,
            RecursionError,
        ) as error:  # not UTF-8, not JSON, nested without end, a number of a million digits
            raise TraceError(
                f"{header_path} is not readable JSON ({error}); record or import the trace again."
            ) from error
        return cls(path, TraceHeader.from_json(value, str(header_path)), sorted(path.glob(SHARD_GLOB)))

    def __iter__(self) -> Iterator[SequenceRouting]:
        for shard in self.shards:
            yield from read_shard(shard, self.topology)

    def sequences(self, stack: Stack | None = None) -> Iterator[SequenceRouting]:
        """Iterate over whole sequences, the parts of each joined; of one stack, or of all."""
        return join_parts(self if stack is None else self.rows(stack))

    def rows(self, stack: Stack) -> Iterator[SequenceRouting]:
        """Iterate over the rows of one stack."""
        return (row for row in self if row.stack == stack)


def _check_types(values: dict[str, Any]) -> None:
    """Refuse header fields of another type than the default's; whole numbers may be null."""
    for item in fields(TraceHeader):
        kind = dict if item.default_factory is dict else str if isinstance(item.default, str) else int
        legal = item.name not in values or isinstance(values[item.name], kind)
        if not legal and not (kind is int and values[item.name] is None):
            raise SettingError(f"{item.name} must be of type {kind.__name__}, got {str(values[item.name])[:80]!r}.")


def _check_limits(topology: MoeTopology) -> None:
    """Refuse what no trace can hold, before anything is allocated by it."""
    experts = topology.max_experts
    if topology.num_layers > MAX_LAYERS or experts > MAX_EXPERTS:
        raise SettingError(
            f"it claims {topology.num_layers} MoE layers and up to {experts} experts in one, at most {MAX_LAYERS} and "
            f"{MAX_EXPERTS} can be stored."
        )
    for stack in topology.stacks:
        width = sum(topology.layers[i].top_k for i in topology.layers_of(stack))
        if width > MAX_WIDTH:
            raise SettingError(f"it claims {width} {stack} expert ids per token, at most {MAX_WIDTH} can be stored.")
