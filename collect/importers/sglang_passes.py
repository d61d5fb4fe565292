"""Passes of a serving engine, linked to sequences by their positions. Knows no files.

A pass holds the tokens of all running requests, their positions, and, in a prefill, how many belong to each request;
it does not name requests. A stretch that begins at position 0 starts a sequence. One that begins at position p goes on
with a sequence that is p tokens long, if in its pass it is the only one that begins at p and there is only one such
sequence. Otherwise a decoded token is dropped, and a prefill starts a sequence without its cached prefix.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..sequence import SequenceRouting
from .contract import file_stem, refuse
from .dummies import cut_tokens
from .report import INCOMPLETE_TOKEN, NOT_FORWARDED, OTHER_PASS, UNLINKED, ImportReport

EXTEND, DECODE, MIXED = 1, 2, 3  # SGLang's ForwardMode; idle passes are empty, others are drafts and verification


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Pass:
    """Hold one forward pass."""

    place: str
    mode: int
    token_ids: np.ndarray
    """int32 [T]."""
    positions: np.ndarray
    """int64 [T]."""
    lengths: list[int]
    """Tokens of each request."""
    experts: np.ndarray
    """Logical ids [T, layers, k], -1 = absent."""
    logical: int
    """Logical experts that the dump's map knows, 0 without a map."""

    @classmethod
    def of(cls, path: Path, place: str, record: dict[str, Any], experts: np.ndarray, logical: int) -> Pass:
        """Check a record.

        Raises:
            TraceError: if its lists do not fit together.
        """
        tokens, positions, lengths = (record.get(name) for name in ("input_ids", "positions", "extend_seq_lens"))
        for name, values in (("input_ids", tokens), ("positions", positions), ("extend_seq_lens", lengths or [])):
            if not isinstance(values, list) or not all(type(item) is int and 0 <= item < 2**31 for item in values):
                raise refuse(path, place, f"{name} must be a list of integers of 0 or more")
        assert isinstance(tokens, list)
        assert isinstance(positions, list)
        lengths = lengths or [1] * len(tokens)
        if not len(tokens) == len(positions) == len(experts) == sum(lengths):
            found = f"{len(tokens)} tokens, {len(positions)} positions, {len(experts)} rows, requests of {sum(lengths)}"
            raise refuse(path, place, f"it has {found} tokens")
        mode = record.get("forward_mode")
        if type(mode) is not int:
            raise refuse(path, place, f"its forward_mode must be a number, got {mode!r}")
        return cls(
            place=place,
            mode=mode,
            token_ids=np.array(tokens, np.int32),
            positions=np.array(positions, np.int64),
            lengths=lengths,
            experts=experts,
            logical=logical,
        )


@dataclass(slots=True, eq=False)
class _Open:
    """Hold a sequence that may go on."""

    start: int
    place: str
    parts: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)  # token ids, experts
    length: int = 0
    prompt: int = 0
    decoded: bool = False

    @property
    def end(self) -> int:
        return self.start + self.length

    def add(self, token_ids: np.ndarray, experts: np.ndarray, *, prefill: bool) -> None:
        self.parts.append((token_ids, experts))
        self.length += len(token_ids)
        self.decoded = self.decoded or not prefill
        if not self.decoded:
            self.prompt = self.length


def linked(
    path: Path, passes: Sequence[Pass], blocks: list[int], top_k: int, report: ImportReport
) -> Iterator[SequenceRouting]:
    """Yield the sequences of one rank's passes; `blocks` are the layers that are MoE layers."""
    sequences: list[_Open] = []
    inside = 0
    for item in passes:
        num_tokens = len(item.token_ids)
        report.read(num_tokens)
        if item.mode not in (EXTEND, DECODE, MIXED):
            report.drop(OTHER_PASS, num_tokens)
            continue
        experts = item.experts[:, blocks, :top_k]
        bounds = np.cumsum([0, *item.lengths]).tolist()
        starts = Counter(int(item.positions[start]) for start, n in zip(bounds, item.lengths, strict=False) if n)
        ends = Counter(sequence.end for sequence in sequences)
        by_end = {sequence.end: sequence for sequence in sequences}
        for start, length in zip(bounds, item.lengths, strict=False):
            part = slice(start, start + length)
            if not length:
                continue
            at = int(item.positions[start])
            if (item.positions[part] != np.arange(at, at + length)).any():
                raise refuse(path, item.place, f"the positions of token {start} and those behind it do not rise by 1")
            prefill = item.mode == EXTEND or length > 1
            found = by_end[at] if at and starts[at] == ends[at] == 1 else None
            if found is None and at and not prefill:
                report.drop(UNLINKED, length)
                continue
            if found is None:
                inside += at > 0
                found = _Open(at, item.place)
                sequences.append(found)
            found.add(item.token_ids[part], experts[part], prefill=prefill)
    if inside:
        report.note(f"{path.name}: {inside} sequences start behind a cached prefix, whose tokens are not in the dump.")
    for number, sequence in enumerate(sequences):
        token_ids, ids = (np.concatenate(items) for items in zip(*sequence.parts, strict=True))
        flat = ids.reshape(len(ids), -1)
        some, every = flat.min(axis=1) < 0, flat.max(axis=1) < 0
        report.drop(NOT_FORWARDED, int(every.sum()))
        report.drop(INCOMPLETE_TOKEN, int((some & ~every).sum()))
        row = SequenceRouting(
            sequence=f"{file_stem(path)}:{number}",
            source=f"{path.name}:{sequence.place}" + (f", from position {sequence.start}" if sequence.start else ""),
            prompt_tokens=sequence.prompt,
            token_ids=token_ids,
            experts=flat.astype(np.int16),
        )
        yield from cut_tokens(row, ~some)
