"""Merging traces of one model into a new one: row by row, checked on the way. Knows headers, rows and shards.

Memory: the rows of one shard read and one being gathered, and the ids of all sequences. The new trace appears whole or
not at all, and nothing is ever written over.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow.parquet as pq

from .checks import FileCheck, OrderCheck
from .errors import SettingError, TraceError
from .notes import kept
from .npz import NpzTrace
from .renaming import Renaming
from .row_checks import RowCheck
from .row_queue import num_bytes
from .sequence import PART_TOKENS, SequenceRouting, split_parts, stored
from .shard import TEXT_FIELD, read_shard, write_shard
from .staging import staged_folder
from .topology import MoeTopology
from .trace import HEADER_NAME, Trace, TraceHeader
from .writer import WriterConfig

log = logging.getLogger(__name__)

# header fields that must agree where both traces know them; the rest says how a trace was made, and may differ
AGREEING = ("model_fingerprint", "tokenizer_fingerprint", "vocab_size", "dtype", "weights")
SIZES = ("hidden_size", "expert_bytes", "dense_bytes")


class MergeResult(NamedTuple):
    """Count what a merged trace holds."""

    trace: Path
    sequences: int
    tokens: int
    """Tokens of all rows, of both stacks where there are two."""
    shards: int
    sources: int
    """Traces that it was merged from."""


def merge(
    sources: Sequence[str | Path],
    out: str | Path,
    *,
    config: WriterConfig | None = None,
    rename: bool = False,
    keep_groups: bool = False,
) -> MergeResult:
    """Write a new trace with the rows of several.

    Sequences keep their ids, those of an `.npz` file are called FILE:NUMBER. Rows are checked as a writer checks them.

    Args:
        sources: trace folders and `.npz` files.
        out: folder of the new trace.
        config: shard sizes.
        rename: put each source's name and a slash before its ids and groups; see `Renaming`.
        keep_groups: with `rename`, leave groups as they are: equal names mean the same document in every source.

    Raises:
        TraceError: if a source is no trace, is damaged or empty, the sources do not belong together, or a sequence
            stands in two of them; the message names file, row and reason.
        SettingError: if `out` exists already, a source is given twice, or groups are to be kept without `rename`.
    """
    if keep_groups and not rename:
        raise SettingError("keep-groups says what --rename leaves as it is; give --rename too, or leave it out.")
    traces = [Trace.open(source) for source in sources]
    renaming = Renaming.of([trace.path for trace in traces], keep_groups=keep_groups) if rename else None
    header = merged_header(traces, None if renaming is None else renaming.prefixes)
    text = any(TEXT_FIELD.name in _column_names(shard) for trace in traces for shard in trace.shards)
    with staged_folder(out) as folder:
        (folder / HEADER_NAME).write_text(json.dumps(header.to_json(), indent=1) + "\n", encoding="utf-8")
        gathering = _Gathering(folder, header, config or WriterConfig(), text=text)
        for number, trace in enumerate(traces):
            for place, row in _checked(trace, header):
                gathering.add(row if renaming is None else renaming.row(row, number), place, trace.path)
        gathering.close()
        if not gathering.owners:
            raise TraceError(f"{', '.join(map(str, sources))}: there are no rows to merge; give traces that hold some.")
    return MergeResult(Path(out), len(gathering.owners), gathering.tokens, gathering.shards, len(traces))


def merged_header(traces: Sequence[Trace], prefixes: Sequence[str] | None = None) -> TraceHeader:
    """Give the header that stands for all traces; how each was made is listed under `recording`.

    Args:
        prefixes: what stands before each trace's ids; None where they keep them.

    Raises:
        TraceError: if the traces do not belong together.
    """
    first = traces[0]
    header = reduce(lambda header, trace: _joined(header, trace, first.path), traces[1:], first.header)
    if len(traces) == 1:
        return header
    made: list[dict[str, Any]] = [
        {"trace": trace.path.name}
        | {name: getattr(trace.header, name) for name in ("versions", "generation", "recording", "seed")}
        | ({} if prefixes is None else {"prefix": prefixes[number]})
        for number, trace in enumerate(traces)
    ]
    shared = {
        name: made[0][name] if all(item[name] == made[0][name] for item in made) else empty
        for name, empty in (("versions", {}), ("generation", {}), ("seed", None))
    }
    notes = kept(note for trace in traces for note in trace.header.notes)
    return replace(header, **shared, recording={"merged": made}, notes=notes)


def _joined(header: TraceHeader, trace: Trace, first: Path) -> TraceHeader:
    """Give a header that knows what both know."""
    here, there = header.topology, trace.topology
    if not here.same_routing(there):
        raise _differing(trace, "topology", there.describe(), here.describe(), first)
    for name in ("scores", "hidden"):
        if getattr(header, name) != getattr(trace.header, name):
            raise _differing(trace, name, getattr(trace.header, name), getattr(header, name), first)
    values: dict[str, Any] = {}
    for name in AGREEING:
        old, new = getattr(header, name), getattr(trace.header, name)
        if name == "vocab_size" and isinstance(trace, NpzTrace):
            new = old if old is not None and new is not None and new <= old else new  # it only saw some of the ids
        if old not in ("", None) and new not in ("", None) and old != new:
            raise _differing(trace, name, new, old, first)
        values[name] = new if old in ("", None) else old
    sizes = {}
    for name in SIZES:
        old, new = getattr(here, name), getattr(there, name)
        if None not in (old, new) and old != new:
            raise _differing(trace, name, new, old, first)
        sizes[name] = new if old is None else old
    return replace(header, topology=MoeTopology(layers=here.layers, **sizes), **values)


def _differing(trace: Trace, name: str, value: object, other: object, first: Path) -> TraceError:
    file = trace.path if isinstance(trace, NpzTrace) else trace.path / HEADER_NAME
    return TraceError(f"{file} has {name} {value!r}, {first} has {other!r}; merge traces of one model and one recipe.")


def _column_names(shard: Path) -> list[str]:
    try:
        return pq.read_schema(shard).names
    except (OSError, ValueError):  # a damaged shard is named when its rows are read
        return []


@dataclass(frozen=True, slots=True)
class _Place:
    """Say where a row stands."""

    file: Path
    row: int

    def error(self, reason: str) -> TraceError:
        return TraceError(f"{self.file}, row {self.row}: {reason}; mend it or leave its trace out.")


def _checked(trace: Trace, header: TraceHeader) -> Iterator[tuple[_Place, SequenceRouting]]:
    """Iterate over a trace's rows with their places; each is checked before it is given, and the file at its end."""
    check_row, check_order = RowCheck(header), OrderCheck()
    files: list[tuple[Path, Any]] = [(shard, read_shard(shard, trace.topology)) for shard in trace.shards]
    for file, rows in files or [(trace.path, trace)]:
        check_file = FileCheck(header.topology)
        for index, row in enumerate(rows):
            place = _Place(file, index)
            if not trace.shards and isinstance(trace, NpzTrace):
                row = replace(row, sequence=row.source)
            elif row.num_tokens > PART_TOKENS:
                raise place.error(f"it has {row.num_tokens} tokens, a part has at most {PART_TOKENS}")
            for part in split_parts(stored(row)):
                for reason in (*check_row(part), *check_order(part)):
                    raise place.error(reason)
                yield place, part
            check_file.add(row, index)
        for _, reason in check_file.zeros():
            raise TraceError(f"{file}: {reason}; leave this trace out.")
        for index, reason in check_file.repeats():
            log.warning("%s, row %s: %s; leave it out before training.", file, index, reason)


class _Gathering:
    """Gather rows into shards; rows of one sequence share one."""

    def __init__(self, folder: Path, header: TraceHeader, config: WriterConfig, *, text: bool) -> None:
        self.folder, self.config = folder, config
        self.columns = {"text": text, "scores": bool(header.scores), "hidden": bool(header.hidden)}
        self.owners: dict[str, Path] = {}
        self.tokens = self.shards = 0
        self._rows: list[SequenceRouting] = []
        self._bytes = 0

    def add(self, row: SequenceRouting, place: _Place, source: Path) -> None:
        """Take a row; a sequence that another source has brought already is refused."""
        owner = self.owners.setdefault(row.sequence, source)
        if owner is not source:
            raise TraceError(
                f"{place.file}, row {place.row}: sequence {row.sequence!r} stands in {owner} too; give --rename to put "
                "each source's name before its ids, or leave one of the two out."
            )
        full = len(self._rows) >= self.config.shard_rows or self._bytes >= self.config.shard_bytes
        if full and row.sequence != self._rows[-1].sequence:
            self.close()
        self._rows.append(row)
        self._bytes += num_bytes(row)
        self.tokens += row.num_tokens

    def close(self) -> None:
        """Write the rows that are left."""
        if self._rows:
            name = f"shard-00000-{self.shards:05d}.parquet"
            write_shard(self.folder / name, self._rows, **self.columns)
            self.shards += 1
            self._rows, self._bytes = [], 0
