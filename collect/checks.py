"""Checks of a routing trace: what the writer refuses and `foregate validate` reports. Knows rows, files and headers.

Row checks look at one row: ids in range, k distinct or -1 per token and MoE layer, weights as declared, token ids
aligned. File checks look at the rows of one file together: not all zero, no warm-up or dummy batch (many identical
rows or tokens: serving engines log one before the first request). Trace checks: each (sequence, stack, part) once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from .errors import TraceError
from .shard import PART_TOKENS, SequenceRouting, read_shard
from .topology import MoeTopology, Stack
from .trace import Trace, TraceHeader

# T tokens, W columns of a row (sum of k over the stack's layers), L MoE layers of the stack

DUMMY_ROWS = 16  # equal rows in a row: real corpora repeat a text twice or thrice, a warm-up batch dozens of times
DUMMY_TOKENS = 256  # equal tokens, routed equally in every layer, in a row: no real text reaches this
FEWEST_ZEROS = 8  # choices of expert 0 and nothing else that are no accident
WEIGHT_SLACK = 0.02  # float16 weights of eight experts sum to 1 within 0.004


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


class RowCheck:
    """Check single rows against a header; holds no state between rows."""

    def __init__(self, header: TraceHeader) -> None:
        self.header = header
        self.layers: dict[str, list[int]] = {
            stack: header.topology.layers_of(stack) for stack in header.topology.stacks
        }
        self.limits_W: dict[str, np.ndarray] = {}
        self.bounds: dict[str, list[int]] = {}
        for stack, layers in self.layers.items():
            chosen = [header.topology.layers[i] for i in layers]
            top_k = [layer.top_k for layer in chosen]
            self.limits_W[stack] = np.repeat([layer.num_experts for layer in chosen], top_k)
            self.bounds[stack] = [0, *np.cumsum(top_k).tolist()]

    def __call__(self, row: SequenceRouting) -> list[str]:
        """List what is wrong with a row, in words; empty where nothing is."""
        if row.stack not in self.layers:
            return [f"its stack is {row.stack!r}, the topology has only {', '.join(self.layers)}"]
        width = len(self.limits_W[row.stack])
        if row.experts.ndim != 2 or row.experts.shape[1] != width or row.experts.dtype.kind not in "iu":
            return [f"its experts must be integers [tokens, {width}], got {row.experts.dtype} {row.experts.shape}"]
        found = [*self._fields(row), *self._tokens(row), *self._weights(row)]
        return found + (list(self._experts(row)) if row.num_tokens else ["it has no tokens"])

    def _fields(self, row: SequenceRouting) -> Iterator[str]:
        if not row.sequence:
            yield "it has no sequence id"
        if row.part < 0:
            yield f"its part is {row.part}, parts count from 0"
        whole = row.part == 0 and row.num_tokens < PART_TOKENS  # else later parts may hold more of the prompt
        if row.prompt_tokens is not None and (row.prompt_tokens < 0 or (whole and row.prompt_tokens > row.num_tokens)):
            yield f"its prompt_tokens is {row.prompt_tokens}, it has {row.num_tokens} tokens"

    def _tokens(self, row: SequenceRouting) -> Iterator[str]:
        ids, vocab_size = row.token_ids, self.header.vocab_size
        if ids is None:
            return
        if len(ids) != row.num_tokens:
            yield f"it lists {len(ids)} token ids and experts for {row.num_tokens} tokens"
        elif len(ids) and (ids.min() < 0 or (vocab_size is not None and ids.max() >= vocab_size)):
            legal = "0 or more" if vocab_size is None else f"0..{vocab_size - 1}"
            yield f"its token ids run from {ids.min()} to {ids.max()}, legal is {legal}"

    def _weights(self, row: SequenceRouting) -> Iterator[str]:
        kind, weights = self.header.weights, row.weights
        if weights is None:
            if kind not in ("", "none"):
                yield f"it has no weights, the header declares {kind!r}"
            return
        if kind == "none":
            yield "it has weights, the header declares none"
        if weights.shape != row.experts.shape:
            yield f"its weights are {weights.shape}, its experts {row.experts.shape}"
            return
        values = weights.astype(np.float32)
        if not np.isfinite(values).all():
            yield "its weights are not all finite"
        elif kind in ("unit", "normalized") and values.size and not -1e-3 <= values.min() <= values.max() <= 1.001:
            yield f"its weights run from {values.min():.4g} to {values.max():.4g}, the header declares {kind!r} (0..1)"
        elif kind == "normalized" and values.size:
            starts = self.bounds[row.stack][:-1]
            sums = np.add.reduceat(values, starts, axis=1)
            whole = np.minimum.reduceat(row.experts, starts, axis=1) >= 0  # dropped experts take their weight along
            wrong = whole & (np.abs(sums - 1) > WEIGHT_SLACK)
            if wrong.any():
                token, layer = np.argwhere(wrong)[0]
                yield (
                    f"its weights sum to {sums[token, layer]:.4g} at token {token}, MoE layer "
                    f"{self.layers[row.stack][layer]}, the header declares 'normalized'"
                )

    def _experts(self, row: SequenceRouting) -> Iterator[str]:
        experts, bounds, layers = row.experts, self.bounds[row.stack], self.layers[row.stack]
        limits_W = self.limits_W[row.stack]
        wrong = (experts < -1) | (experts >= limits_W)
        if wrong.any():
            token, column = np.argwhere(wrong)[0]
            layer = int(np.searchsorted(bounds, column, side="right")) - 1
            yield (
                f"expert {experts[token, column]} at token {token}, MoE layer {layers[layer]}, is out of range "
                f"0..{limits_W[column] - 1} ({int(wrong.sum())} such entries)"
            )
        elif (experts == -1).all():
            yield "all its experts are -1, nothing was recorded"
        for layer, (start, stop) in zip(layers, pairwise(bounds), strict=True):
            ids = np.sort(experts[:, start:stop], axis=1)
            twice = ((ids[:, 1:] == ids[:, :-1]) & (ids[:, 1:] >= 0)).any(axis=1)
            if twice.any():
                token = int(np.argmax(twice))
                yield (
                    f"experts {experts[token, start:stop].tolist()} at token {token}, MoE layer {layer}, are not "
                    f"distinct ({int(twice.sum())} such tokens)"
                )
                break


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
    """Check a whole trace, folder or `.npz`, and yield every problem; a path that is no trace is one problem too."""
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
