"""Opening a trace folder for writing: a new one, or one to go on with. Knows headers and which sequences are there."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from .errors import TraceError
from .sequence import columns_of
from .staging import staged_file
from .topology import MoeTopology
from .trace import HEADER_NAME, Trace, TraceHeader

CHANGING = ("versions",)  # header fields in which a resumed run may differ


@dataclass(frozen=True, kw_only=True, slots=True)
class Resumed:
    """Say what a trace folder held when it was opened for writing."""

    is_new: bool
    """Whether the header was written now."""
    made_folder: bool
    """Whether the folder was made now."""
    sequences: frozenset[str] = frozenset()
    """Ids of the sequences that are complete."""
    tokens: int = 0
    """Tokens of their rows."""
    next_shard: int = 0
    """Number of this rank's next shard."""


def open_folder(path: Path, header: TraceHeader, rank: int, *, resume: bool) -> Resumed:
    """Make a trace folder with its header, or take stock of the one that is there; stale temporary files are removed.

    Raises:
        TraceError: if something stands at the path that may not be written to, or the headers differ.
    """
    own = f"shard-{rank:05d}-"
    shards = sorted(path.glob(f"{own}*.parquet"))
    check_target(path, resume=resume or (rank > 0 and not shards))
    if not (path / HEADER_NAME).exists():
        return _new(path, header)
    trace = Trace.open(path)
    _compare(path, trace.header, header)
    for stale in path.glob(f".{own}*.tmp"):
        stale.unlink()
    sequences, tokens = _contents(trace)
    return Resumed(
        is_new=False,
        made_folder=False,
        sequences=frozenset(sequences),
        tokens=tokens,
        next_shard=int(shards[-1].stem.rpartition("-")[2]) + 1 if shards else 0,
    )


def check_target(path: Path, *, resume: bool) -> None:
    """Refuse a path that a trace cannot be written to; a run calls this before its slow parts.

    Raises:
        TraceError: if there is a file, a folder of other files, or a trace that is not to be gone on with.
    """
    if not path.exists():
        return
    if not path.is_dir():
        raise TraceError(f"{path} is a file; give --out a folder that is empty or does not exist.")
    if (path / HEADER_NAME).exists():
        if not resume:
            raise TraceError(f"{path} holds a trace already; give --resume to go on with it, or another --out.")
        return
    others = sorted(item.name for item in path.iterdir() if not item.name.endswith(".tmp"))
    if others:
        raise TraceError(
            f"{path} holds {others[0]} and no {HEADER_NAME}; give --out a folder that is empty or does not exist."
        )


def _new(path: Path, header: TraceHeader) -> Resumed:
    made_folder = not path.exists()
    path.mkdir(parents=True, exist_ok=True)
    try:
        with staged_file(path / HEADER_NAME) as file:
            file.write(json.dumps(header.to_json(), indent=1).encode() + b"\n")
    except OSError:
        if made_folder:
            path.rmdir()
        raise
    return Resumed(is_new=True, made_folder=made_folder)


def _compare(path: Path, there: TraceHeader, here: TraceHeader) -> None:
    old, new = there.to_json(), here.to_json()
    for name in new:
        if name not in CHANGING and old[name] != new[name]:
            if name == "topology":
                old[name], new[name] = there.topology.describe(), here.topology.describe()
            raise TraceError(
                f"{path} was recorded with {name} {old[name]!r}, this run has {new[name]!r}; "
                "give the same settings, or another --out."
            )


def _contents(trace: Trace) -> tuple[set[str], int]:
    """List the sequences of all shards and count their tokens, reading only two columns."""
    sequences: set[str] = set()
    tokens = 0
    for shard in trace.shards:
        try:
            table = pq.read_table(shard, columns=["sequence", "stack", "experts"], page_checksum_verification=True)
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            raise TraceError(
                f"{shard} is damaged ({error}); delete this shard to record its sequences again."
            ) from error
        sequences.update(table.column("sequence").to_pylist())
        tokens += _num_tokens(table, trace.topology)
    return sequences, tokens


def _num_tokens(table: pa.Table, topology: MoeTopology) -> int:
    widths = {stack: columns.width for stack, columns in columns_of(topology).items()}
    lengths = pc.list_value_length(table.column("experts")).to_pylist()  # type: ignore[attr-defined]
    stacks = table.column("stack").to_pylist()
    return sum(length // widths[stack] for length, stack in zip(lengths, stacks, strict=True))
