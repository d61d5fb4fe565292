"""Sequences of a trace by number, read when they are needed: an index of all, and the row groups read last.

One pass over the trace makes the index: where each sequence's parts stand, its length and group. Afterwards at most
`memory_bytes` of decoded rows are kept, however large the trace is. Knows traces; knows no batches or predictors.
An .npz trace is in memory as a whole anyway and counts as one row group.
"""

# N sequences, P parts of sequences

from __future__ import annotations

from collections import OrderedDict
from dataclasses import fields, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..collect.row_groups import read_row_group, row_group_sizes
from ..collect.sequence import columns_of
from ..collect.topology import Stack
from ..collect.trace import SequenceRouting, Trace
from ..predictors.rows import ids_of, join_parts

UNREAD = ("weights", "text", "hidden")  # columns that training has no use for


class _Unit(NamedTuple):
    """A row group."""

    path: Path
    group: int
    first: int


class RowSource:
    """Give sequences of one stack of a trace, those of two tokens or more, by their number.

    Args:
        trace: the trace.
        stack: the stack.
        memory_bytes: decoded rows that are kept; the row group in use is kept even where it is larger.

    Raises:
        TraceError: if the trace is damaged.
    """

    def __init__(self, trace: Trace, stack: Stack, memory_bytes: int) -> None:
        self.trace, self.memory_bytes = trace, memory_bytes
        self.stack: Stack = stack
        self._scores = False
        self._units = [
            _Unit(path, group, first)
            for path in trace.shards
            for group, first in enumerate(np.cumsum([0, *row_group_sizes(path)])[:-1].tolist())
        ] or [_Unit(trace.path, 0, 0)]
        self._kept: OrderedDict[int, list[SequenceRouting]] = OrderedDict()
        self._kept_tokens: dict[int, int] = {}
        self._index()

    def __len__(self) -> int:
        return len(self.lengths_N)

    @property
    def scores(self) -> bool:
        """Whether rows have their router scores."""
        return self._scores

    @scores.setter
    def scores(self, wanted: bool) -> None:
        if wanted != self._scores:
            self._scores = wanted
            self._kept.clear()
            self._kept_tokens.clear()

    @property
    def bytes_per_token(self) -> int:
        """Memory that a decoded token takes."""
        columns = columns_of(self.trace.topology)[self.stack]
        return 2 * columns.width + 4 + (4 * columns.score_width if self._scores else 0)

    def span(self, number: int, start: int, stop: int) -> SequenceRouting:
        """Give tokens start..stop of a sequence, at least one, as views where they lie in one part."""
        pieces, at = [], 0
        for part in range(self._starts_N[number], self._stops_N[number]):
            low, high = max(start - at, 0), min(stop - at, int(self._lengths_P[part]))
            if low < high:
                pieces.append(cut(self._read(int(self._units_P[part]))[int(self._places_P[part])], low, high))
            at += int(self._lengths_P[part])
        (row,) = join_parts(pieces)
        return row

    def row(self, number: int) -> SequenceRouting:
        """Give a whole sequence."""
        return self.span(number, 0, int(self.lengths_N[number]))

    def _index(self) -> None:
        names: list[str] = []
        groups: list[str | None] = []
        starts: list[int] = []
        parts: list[tuple[int, int, int]] = []
        self.highest_id, self.lowest_id, self.num_ids = -1, -1, 0
        for unit in range(len(self._units)):
            for place, row in enumerate(self._read(unit)):
                if not row.num_tokens:
                    continue
                if not names or names[-1] != row.sequence:
                    names.append(row.sequence)
                    groups.append(row.group)
                    starts.append(len(parts))
                parts.append((unit, place, row.num_tokens))
                self._note(row)
        self._units_P, self._places_P, self._lengths_P = np.array(parts, np.int32).reshape(-1, 3).T
        bounds = np.array([*starts, len(parts)])
        lengths = np.diff(np.concatenate([[0], np.cumsum(self._lengths_P, dtype=np.int64)])[bounds])
        kept = np.flatnonzero(lengths > 1)  # of one token nothing can be predicted
        self.names, self.groups = [names[n] for n in kept], [groups[n] for n in kept]
        self._starts_N, self._stops_N, self.lengths_N = bounds[kept], bounds[kept + 1], lengths[kept]
        self.start_N = np.concatenate([[0], np.cumsum(self.lengths_N)])[:-1].astype(np.int64)

    def _note(self, row: SequenceRouting) -> None:
        """Note which token ids there are."""
        if row.token_ids is not None:
            ids = ids_of(row)
            self.lowest_id = int(ids.min()) if not self.num_ids else min(self.lowest_id, int(ids.min()))
            self.highest_id = max(self.highest_id, int(ids.max()))
            self.num_ids += len(ids)

    def _read(self, unit: int) -> list[SequenceRouting]:
        """Give the stack's rows of a row group, and forget those that were used longest ago."""
        if unit in self._kept:
            self._kept.move_to_end(unit)
            return self._kept[unit]
        if self.trace.shards:
            path, group, first = self._units[unit]
            unread = UNREAD if self._scores else (*UNREAD, "scores")
            read = read_row_group(path, group, self.trace.topology, first=first, leave_out=unread)
            rows = [row for row in read if row.stack == self.stack]
        else:
            rows = list(self.trace.rows(self.stack))
        self._kept[unit] = rows
        self._kept_tokens[unit] = sum(row.num_tokens for row in rows)
        while len(self._kept) > 1 and sum(self._kept_tokens.values()) * self.bytes_per_token > self.memory_bytes:
            oldest, _ = self._kept.popitem(last=False)
            del self._kept_tokens[oldest]
        return rows


def cut(row: SequenceRouting, start: int, stop: int) -> SequenceRouting:
    """Give tokens start..stop of a row, as views."""
    if start == 0 and stop == row.num_tokens:
        return row
    values = {item.name: getattr(row, item.name) for item in fields(row)}
    return replace(row, **{n: value[start:stop] for n, value in values.items() if isinstance(value, np.ndarray)})
