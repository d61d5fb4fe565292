"""Opening a trace folder for writing: a new one, or one to go on with. Knows headers and which sequences are there."""

from __future__ import annotations

import contextlib
import itertools
import json
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from .errors import TraceError
from .lock import SUFFIX, WriterLock, abandoned, others_write
from .sequence import columns_of
from .staging import staged_file
from .topology import MoeTopology
from .trace import HEADER_NAME, SHARD_GLOB, Trace, TraceHeader

CHANGING = ("versions",)  # header fields in which a resumed run may differ


@dataclass(frozen=True, kw_only=True, slots=True)
class Resumed:
    """Say what a trace folder held when it was opened for writing."""

    is_new: bool
    """Whether the header was written now."""
    made_folder: bool
    """Whether the folder was made now."""
    lock: WriterLock
    """What keeps a second writer of the same rank out; whoever opened the folder releases it."""
    sequences: frozenset[str] = frozenset()
    """Ids of the sequences that are complete."""
    tokens: int = 0
    """Tokens of their rows."""
    next_shard: int = 0
    """Number of this rank's next shard."""


def open_folder(path: Path, header: TraceHeader, rank: int, *, resume: bool) -> Resumed:
    """Make a trace folder with its header, or take stock of the one that is there; stale temporary files are removed.

    Raises:
        TraceError: if something stands at the path that may not be written to, the headers differ, or another process
            writes it as the same rank.
    """
    _check_target(path, rank, resume=resume)
    made_folder = not path.exists()
    path.mkdir(parents=True, exist_ok=True)
    try:
        lock = WriterLock(path, rank)
        try:
            _check_target(path, rank, resume=resume)  # again: another process may just have finished
            return _open(path, header, rank, lock, made_folder=made_folder)
        except BaseException:
            lock.release()
            raise
    except BaseException:
        if made_folder:
            with contextlib.suppress(OSError):  # another process has put something into it
                path.rmdir()
        raise


def leave_empty(path: Path, resumed: Resumed, rank: int) -> None:
    """Take back the header of a run that wrote nothing, unless other ranks have written or may still write."""
    if resumed.is_new and not any(path.glob(SHARD_GLOB)) and not others_write(path, rank):
        (path / HEADER_NAME).unlink(missing_ok=True)


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
    others = sorted(item.name for item in path.iterdir() if not item.name.endswith((".tmp", SUFFIX)))
    if others:
        raise TraceError(
            f"{path} holds {others[0]} and no {HEADER_NAME}; give --out a folder that is empty or does not exist."
        )


def _check_target(path: Path, rank: int, *, resume: bool) -> None:
    check_target(path, resume=resume or (rank > 0 and not any(path.glob(f"shard-{rank:05d}-*.parquet"))))


def _open(path: Path, header: TraceHeader, rank: int, lock: WriterLock, *, made_folder: bool) -> Resumed:
    if not (path / HEADER_NAME).exists():
        with staged_file(path / HEADER_NAME) as file:
            file.write(json.dumps(header.to_json(), indent=1).encode() + b"\n")
        return Resumed(is_new=True, made_folder=made_folder, lock=lock)
    trace = Trace.open(path)
    _compare(path, trace.header, header)
    own = f"shard-{rank:05d}-"
    for number in itertools.chain([rank], abandoned(path, rank) if rank == 0 else ()):
        for stale in path.glob(f".shard-{number:05d}-*.tmp"):
            stale.unlink()
    sequences, tokens = _contents(trace)
    shards = sorted(path.glob(f"{own}*.parquet"))
    return Resumed(
        is_new=False,
        made_folder=made_folder,
        lock=lock,
        sequences=frozenset(sequences),
        tokens=tokens,
        next_shard=int(shards[-1].stem.rpartition("-")[2]) + 1 if shards else 0,
    )


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
