"""Events of a replay: which distinct experts each (forward, MoE layer) of a trace needs at once, as flat arrays.

Three readings of a trace: `decode` takes every token as a forward of its own, `prefill` every row as one forward (over
PART_TOKENS tokens, one per chunk), `recorded` the prompt of a row as a prefill and its other tokens as decode; rows of
an encoder and rows that do not know their prompt are forwards. An event without a needed expert does not exist.

Example: 2 layers of 4 experts, top-2, tokens [[3, 1], [0, 0]] and [[1, 2], [-1, 0]]. decode: (1, 3), (4), (1, 2), (4);
prefill: (1, 2, 3), (4). Knows rows and NumPy; no caches, policies or time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import numpy as np

from ..collect.errors import SettingError, TraceError
from ..collect.shard import PART_TOKENS, SequenceRouting
from ..collect.topology import MoeTopology, Stack

Reading = Literal["decode", "prefill", "recorded"]
BATCH_TOKENS = 1 << 15  # rows are turned into events together up to this many tokens: about 30 MiB of work arrays
BATCH_CELLS = 1 << 23  # forwards x experts of one table of unions: 8 MiB
BLOCK_EVENTS = 1 << 14  # events that iteration turns into Python numbers at a time


class Event(NamedTuple):
    """The distinct experts that one (step, MoE layer) needs at once."""

    needed: tuple[int, ...]
    """Flat indices, ascending."""
    one_token: bool
    """Whether the event serves a single token."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Events:
    """Hold N events with A needed experts in all; iterate to get them as `Event`."""

    experts: np.ndarray
    """int32 [A], flat indices, ascending and distinct inside an event."""
    starts: np.ndarray
    """int64 [N + 1]; event i needs experts[starts[i] : starts[i + 1]]."""
    layers: np.ndarray
    """int32 [N], MoE layer."""
    steps: np.ndarray
    """int64 [N], number of the forward, ascending; forwards without an event leave gaps."""
    tokens: np.ndarray
    """int32 [N], tokens that the forward computes; 1 makes a one-token event."""
    sequences: np.ndarray
    """int32 [N], number of the sequence, ascending."""
    num_tokens: int
    """Tokens of all rows."""

    def __len__(self) -> int:
        return len(self.layers)

    @property
    def accesses(self) -> int:
        """Distinct experts needed, summed over events."""
        return len(self.experts)

    @property
    def needs(self) -> np.ndarray:
        """Experts needed by each event, int64 [N]."""
        return np.diff(self.starts)

    def __iter__(self) -> Iterator[Event]:
        for first in range(0, len(self), BLOCK_EVENTS):
            starts = self.starts[first : first + BLOCK_EVENTS + 1]
            experts = self.experts[starts[0] : starts[-1]].tolist()
            bounds = (starts - starts[0]).tolist()
            single = (self.tokens[first : first + BLOCK_EVENTS] == 1).tolist()
            for index, one_token in enumerate(single):
                yield Event(tuple(experts[bounds[index] : bounds[index + 1]]), one_token)


class Forwards(NamedTuple):
    """Tokens of one row that are read in the same way."""

    row: SequenceRouting
    start: int
    """The first of them."""
    experts: np.ndarray
    """[T, columns of the stack]."""
    together: bool
    """One forward for all tokens, instead of one for each."""
    sequence: int
    """Number of the sequence."""

    @property
    def num_forwards(self) -> int:
        """Number of forwards."""
        return 1 if self.together else len(self.experts)

    @property
    def kind(self) -> tuple[Stack, bool]:
        """What may be turned into events at once."""
        return self.row.stack, self.together


def events_of(rows: Iterable[SequenceRouting], topology: MoeTopology, how: Reading) -> Events:
    """Turn rows into events, in the order of the rows.

    Raises:
        SettingError: if `how` is none of the three readings.
        TraceError: if a row names an expert that its layer does not have.
    """
    if how not in get_args(Reading):
        raise SettingError(f"A trace is replayed as one of {', '.join(get_args(Reading))}, got {how!r}.")
    parts: list[tuple[np.ndarray, ...]] = []
    batch: list[Forwards] = []
    num_tokens = step = size = 0

    def flush() -> None:
        nonlocal step, size
        if batch:
            experts, needs, layers, steps, tokens, sequences, forwards = _events(batch, topology)
            parts.append((experts, needs, layers, steps + step, tokens, sequences))
            step += forwards
        batch.clear()
        size = 0

    for item in forwards_of(rows, how):
        num_tokens += len(item.experts)
        cells = topology.num_experts * (BATCH_TOKENS / BATCH_CELLS) if item.together else 0
        if batch and (batch[0].kind != item.kind or size + max(len(item.experts), cells) > BATCH_TOKENS):
            flush()
        batch.append(item)
        size += max(len(item.experts), cells)
    flush()
    dtypes = (np.int32, np.int64, np.int32, np.int64, np.int32, np.int32)
    experts, needs, layers, steps, tokens, sequences = (
        np.concatenate([np.zeros(0, dtype), *(part[index] for part in parts)], dtype=dtype)
        for index, dtype in enumerate(dtypes)
    )
    starts = np.zeros(len(needs) + 1, np.int64)
    np.cumsum(needs, out=starts[1:])
    return Events(
        experts=experts,
        starts=starts,
        layers=layers,
        steps=steps,
        tokens=tokens,
        sequences=sequences,
        num_tokens=num_tokens,
    )


def forwards_of(rows: Iterable[SequenceRouting], how: Reading) -> Iterator[Forwards]:
    """Cut rows into what is read together and what is read token by token; `Events.steps` number their forwards."""
    sequence, name, stack, position = -1, "", "", 0
    for row in rows:
        if sequence < 0 or row.sequence != name or (row.stack == stack and row.part == 0):
            sequence += 1
        if row.part == 0 or (row.sequence, row.stack) != (name, stack):
            position = row.part * PART_TOKENS  # parts before this one are PART_TOKENS long each
        name, stack = row.sequence, row.stack
        prompt = row.num_tokens
        if how == "decode":
            prompt = 0
        elif how == "recorded" and row.prompt_tokens is not None and row.stack != "encoder":
            prompt = min(max(row.prompt_tokens - position, 0), row.num_tokens)
        for start in range(0, prompt, PART_TOKENS):
            chunk = row.experts[start : min(start + PART_TOKENS, prompt)]
            yield Forwards(row, start, chunk, True, sequence)
        for start in range(prompt, row.num_tokens, BATCH_TOKENS):
            yield Forwards(row, start, row.experts[start : start + BATCH_TOKENS], False, sequence)
        position += row.num_tokens


def _events(batch: list[Forwards], topology: MoeTopology) -> tuple:
    """Give experts [A], needs, layers, steps, tokens, sequences [N each] of forwards of one kind, and their number."""
    stack, together = batch[0].kind
    layers = np.array(topology.layers_of(stack), np.int32)
    experts = batch[0].experts if len(batch) == 1 else np.concatenate([item.experts for item in batch])
    _check(batch, experts, layers, topology)
    lengths = np.array([len(item.experts) for item in batch])
    sequences = np.array([item.sequence for item in batch], np.int32)
    if together:
        flat, needs = _unions(_by_layer(experts, layers, topology), lengths, topology)
        needs = needs[:, layers]
        tokens = lengths
    else:
        flat, needs = _sets(_by_layer(experts, layers, topology))
        sequences = np.repeat(sequences, lengths)
        tokens = np.ones(len(experts), np.int32)
    steps, columns = np.nonzero(needs)  # by forward, then by layer
    return flat, needs[steps, columns], layers[columns], steps, tokens[steps], sequences[steps], len(needs)


def _by_layer(experts: np.ndarray, layers: np.ndarray, topology: MoeTopology) -> np.ndarray:
    """Give flat indices [T, layers, largest k]; what is absent is negative."""
    widths = [topology.layers[layer].top_k for layer in layers]
    if len(set(widths)) == 1:
        apart = experts.astype(np.int32).reshape(len(experts), len(widths), widths[0])
    else:
        apart = np.full((len(experts), len(widths), max(widths)), -1, np.int32)
        first = 0
        for index, width in enumerate(widths):
            apart[:, index, :width] = experts[:, first : first + width]
            first += width
    offsets = np.array([topology.offsets[layer] for layer in layers], np.int32)[:, None]
    return apart + offsets if apart.min(initial=0) >= 0 else np.where(apart >= 0, apart + offsets, -1)


def _sets(apart: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Give the distinct experts of every (token, layer), ascending, and their numbers [T, layers]."""
    apart = np.sort(apart, axis=-1)
    valid = apart >= 0
    valid[..., 1:] &= apart[..., 1:] != apart[..., :-1]
    if valid.all():
        return apart.reshape(-1), np.full(apart.shape[:2], apart.shape[2])
    return apart[valid], valid.sum(axis=-1)


def _unions(apart: np.ndarray, lengths: np.ndarray, topology: MoeTopology) -> tuple[np.ndarray, np.ndarray]:
    """Give the distinct experts of every (forward, layer), ascending, and their numbers [forwards, all layers]."""
    table = np.zeros((len(lengths), topology.num_experts), bool)
    forwards = np.repeat(np.arange(len(lengths)), lengths)
    rows = np.broadcast_to(forwards[:, None, None], apart.shape)
    present = apart >= 0
    table[rows[present], apart[present]] = True
    needs = np.add.reduceat(table, topology.offsets[:-1], axis=1, dtype=np.int64)
    return np.nonzero(table)[1], needs


def _check(batch: list[Forwards], experts: np.ndarray, layers: np.ndarray, topology: MoeTopology) -> None:
    """Refuse ids that would be another layer's in a flat index."""
    sizes = [topology.layers[layer].num_experts for layer in layers for _ in range(topology.layers[layer].top_k)]
    if not experts.size or (experts.max(axis=0) < sizes).all():
        return
    for item in batch:
        wrong = np.argwhere(item.experts >= sizes)
        if len(wrong):
            token, column = wrong[0].tolist()
            raise TraceError(
                f"Sequence {item.row.sequence!r} names expert {item.experts[token, column]} where its layer has "
                f"{sizes[column]}; run foregate validate, and record or import the trace again."
            )
