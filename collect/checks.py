"""Checks of a routing trace: what the writer refuses and `foregate validate` reports. Knows rows, files and headers.

Row checks (`row_checks.py`) look at one row. File checks look at the rows of one file together: not all zero, no
warm-up or dummy batch (many identical rows or tokens: serving engines log one before the first request). Trace checks:
each (sequence, stack, part) once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .errors import TraceError
from .load_table import HEADER_NAME as LOAD_HEADER
from .load_table import TABLE_NAME as LOAD_TABLE
from .load_table import LoadTable
from .row_checks import RowCheck
from .sequence import PART_TOKENS, SequenceRouting
from .shard import read_shard
from .topology import MoeTopology, Stack
from .trace import Trace

DUMMY_ROWS = 16  # equal rows in a row: real corpora repeat a text twice or thrice, a warm-up batch dozens of times
DUMMY_TOKENS = 256  # equal tokens, routed equally in every layer, in a row: no real text reaches this
FEWEST_ZEROS = 8  # choices of expert 0 and nothing else that are no accident


@dataclass(frozen=True, slots=True)
class Problem:
    """Say what is wrong in a trace, and where."""

    file: str
    row: int | None
    """Index of the row in its file; None where the file as a whole is meant."""
    reason: str

    def to_json(self) -> dict[str, Any]:
        """Give the problem as plain JSON values."""
        return {"file": self.file, "row": self.row, "reason": self.reason}

    def __str__(self) -> str:
        return f"{self.file}{'' if self.row is None else f', row {self.row}'}: {self.reason}"


class FileCheck:
    """Check the rows of one file together: add each row, then ask for zeros and repeats."""

    def __init__(self, topology: MoeTopology) -> None:
        self.choice_W: dict[Stack, np.ndarray] = {}  # where a layer has more than one expert to choose from
        for stack in topology.stacks:
            chosen = [topology.layers[i] for i in topology.layers_of(stack)]
            self.choice_W[stack] = np.repeat([layer.num_experts > 1 for layer in chosen], [x.top_k for x in chosen])
        self.zero: dict[Stack, tuple[bool, int]] = {}
        self.last: dict[Stack, SequenceRouting] = {}
        self.alike: dict[Stack, int] = {}
        self.found: list[tuple[int, str]] = []

    def add(self, row: SequenceRouting, index: int) -> None:
        """Look at one row; its arrays must not change until the next row of its stack was added."""
        only_zero, choices = self.zero.get(row.stack, (True, 0))
        if only_zero:
            zeros = int((row.experts[:, self.choice_W[row.stack]] == 0).sum())
            self.zero[row.stack] = (not (row.experts > 0).any(), choices + zeros)
        run, start = _longest_run(row)
        if run >= DUMMY_TOKENS:
            self.found.append(
                (index, f"{run} equal tokens from token {start} on are routed alike: a warm-up or padding")
            )
        last = self.last.get(row.stack)
        # a decoder's rows may well be alike: a start token and a one-word label
        same = row.stack != "decoder" and last is not None and _same(last, row)
        self.alike[row.stack] = self.alike.get(row.stack, 1) + 1 if same else 1
        if self.alike[row.stack] == DUMMY_ROWS:
            reason = f"this and the {DUMMY_ROWS - 1} {row.stack} rows before it are identical: a warm-up or dummy batch"
            self.found.append((index, reason))
        self.last[row.stack] = row

    def zeros(self) -> list[tuple[None, str]]:
        """List the stacks that hold expert 0 and nothing else."""
        return [
            (None, f"all {choices} choices of its {stack} rows are expert 0: the recording of a router that never ran")
            for stack, (only_zero, choices) in self.zero.items()
            if only_zero and choices >= FEWEST_ZEROS
        ]

    def repeats(self) -> list[tuple[int, str]]:
        """List (row index, reason) of what looks like a warm-up, a dummy batch or stored padding."""
        return self.found

    def problems(self) -> list[tuple[int | None, str]]:
        """List both."""
        return [*self.zeros(), *self.repeats()]


class OrderCheck:
    """Check that each (sequence, stack, part) comes once and parts follow one another."""

    def __init__(self) -> None:
        self.seen: dict[tuple[str, str], int] = {}

    def __call__(self, row: SequenceRouting) -> list[str]:
        """List what is wrong with a row's place, and remember it."""
        key = (row.sequence, row.stack)
        last = self.seen.get(key, -1)
        if row.part <= last:
            return [f"part {row.part} of sequence {row.sequence!r} ({row.stack}) stands twice in the trace"]
        self.seen[key] = row.part
        if row.part != last + 1:
            return [f"part {row.part} of sequence {row.sequence!r} ({row.stack}) follows part {last}"]
        return []


def check_trace(path: str | Path) -> Iterator[Problem]:
    """Check a whole trace, folder or `.npz`, and yield every problem; a path that is no trace is one problem too.

    A load table is checked by its own rules.
    """
    if (Path(path) / LOAD_HEADER).is_file():
        yield from _check_load_table(Path(path))
        return
    try:
        trace = Trace.open(path)
    except TraceError as error:
        yield Problem(str(path), None, str(error))
        return
    check_row, check_order = RowCheck(trace.header), OrderCheck()
    num_rows = 0
    for name, read in _files(trace):
        check_file, damaged = FileCheck(trace.topology), []

        def report(row: int, reason: str, found: list[tuple[int, str]] = damaged) -> None:
            found.append((row, reason))

        try:
            for index, row in enumerate(read(report)):
                num_rows += 1
                too_long = trace.shards and row.num_tokens > PART_TOKENS
                long = [f"it has {row.num_tokens} tokens, a part has at most {PART_TOKENS}"] if too_long else []
                for reason in [*long, *check_row(row), *check_order(row)]:
                    yield Problem(name, index + len(damaged), reason)
                check_file.add(row, index + len(damaged))
        except TraceError as error:
            yield Problem(name, None, str(error))
        for row_index, reason in [*damaged, *check_file.problems()]:
            yield Problem(name, row_index, reason)
    if not num_rows:
        yield Problem(str(path), None, "it holds no rows")


def _check_load_table(path: Path) -> Iterator[Problem]:
    name = str(path / LOAD_TABLE)
    try:
        table = LoadTable.open(path)
        for row, reason in table.problems():
            yield Problem(name, row, reason)
    except TraceError as error:
        yield Problem(name, None, str(error))


Reader = Callable[[Callable[[int, str], None]], Iterable[SequenceRouting]]


def _files(trace: Trace) -> list[tuple[str, Reader]]:
    if not trace.shards:
        return [(str(trace.path), lambda report: trace)]
    return [
        (str(shard), lambda report, shard=shard: read_shard(shard, trace.topology, report)) for shard in trace.shards
    ]


def _longest_run(row: SequenceRouting) -> tuple[int, int]:
    """Give length and start of the longest run of equal tokens with equal routing."""
    if row.num_tokens < DUMMY_TOKENS:
        return row.num_tokens and 1, 0
    same = (row.experts[1:] == row.experts[:-1]).all(axis=1)
    if row.token_ids is not None and len(row.token_ids) == row.num_tokens:
        same &= row.token_ids[1:] == row.token_ids[:-1]
    edges = np.flatnonzero(np.diff(np.concatenate([[0], same.view(np.int8), [0]])))
    if not len(edges):
        return 1, 0
    lengths = edges[1::2] - edges[::2] + 1
    longest = int(lengths.argmax())
    return int(lengths[longest]), int(edges[2 * longest])


def _same(a: SequenceRouting, b: SequenceRouting) -> bool:
    return (
        np.array_equal(a.experts, b.experts)
        and (a.token_ids is None) == (b.token_ids is None)
        and (a.token_ids is None or b.token_ids is None or np.array_equal(a.token_ids, b.token_ids))
    )
