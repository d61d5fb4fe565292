"""Rows of a routing trace: the routing of one sequence in one stack, or of one part of it. Knows NumPy, no files.

Sequences over PART_TOKENS tokens continue in the next part. Columns follow the topology: k per MoE layer of the stack.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np

from .errors import TraceError
from .topology import MoeTopology, Stack

PART_TOKENS = 4096  # so that a row stays a few hundred KiB


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
    scores: np.ndarray | None = None
    """float32 [T, sum of num_experts over the stack's layers]: what the top-k chose from, only where asked for."""
    text: str | None = None
    """The text itself, only where it was asked for."""
    hidden: np.ndarray | None = None
    """float16 [T, MoE layers of the stack * hidden size]: what the routers' gates saw, only where asked for."""

    @property
    def num_tokens(self) -> int:
        """Tokens of this row."""
        return len(self.experts)

    def layer_experts(self, topology: MoeTopology) -> list[np.ndarray]:
        """Split the columns: one int16 [T, k] view per MoE layer of the row's stack."""
        bounds = np.cumsum([0] + [topology.layers[i].top_k for i in topology.layers_of(self.stack)])
        return [self.experts[:, a:b] for a, b in pairwise(bounds)]


class StackColumns(NamedTuple):
    """Say which columns of a row belong to which MoE layer of its stack."""

    layers: list[int]
    """MoE-layer indices, in order."""
    bounds: list[int]
    """Layer i has the columns bounds[i]..bounds[i + 1] of experts and weights."""
    score_bounds: list[int]
    """Layer i has the columns score_bounds[i]..score_bounds[i + 1] of scores."""
    hidden_width: int
    """Columns of hidden states: layers x hidden size; 0 where the topology does not know the size."""
    limits_W: np.ndarray
    """Experts of the layer that each column belongs to."""

    @property
    def width(self) -> int:
        """Columns of experts and weights: the sum of k."""
        return self.bounds[-1]

    @property
    def score_width(self) -> int:
        """Columns of scores: the sum of num_experts."""
        return self.score_bounds[-1]

    def out_of_range(self, experts: np.ndarray) -> str | None:
        """Say which id of a row's experts is none of its layer's, neither -1; None where all are legal."""
        if not experts.size or (experts.min() >= -1 and experts.max() < self.limits_W.min()):
            return None
        wrong = (experts < -1) | (experts >= self.limits_W)
        if not wrong.any():
            return None
        token, column = np.argwhere(wrong)[0]
        layer = self.layers[int(np.searchsorted(self.bounds, column, side="right")) - 1]
        return (
            f"expert {experts[token, column]} at token {token}, MoE layer {layer}, is out of range "
            f"0..{self.limits_W[column] - 1} ({int(wrong.sum())} such entries)"
        )


def columns_of(topology: MoeTopology) -> dict[Stack, StackColumns]:
    """Give the columns of each stack's rows."""
    columns = {}
    for stack in topology.stacks:
        layers = topology.layers_of(stack)
        top_k, experts = zip(*((topology.layers[i].top_k, topology.layers[i].num_experts) for i in layers), strict=True)
        columns[stack] = StackColumns(
            layers,
            [0, *accumulate(top_k)],
            [0, *accumulate(experts)],
            len(layers) * (topology.hidden_size or 0),
            np.repeat(experts, top_k),
        )
    return columns


def stored(row: SequenceRouting) -> SequenceRouting:
    """Give a row with its arrays in the dtypes of the schema; what does not fit is left as it is, for the checks.

    Weights beyond float16 become infinite, which the checks refuse.
    """

    def fit(values: np.ndarray | None, dtype: type[np.integer]) -> np.ndarray | None:
        if values is None or values.dtype == dtype or values.dtype.kind not in "iu":
            return values
        legal = np.iinfo(dtype)
        inside = not values.size or (legal.min <= int(values.min()) and int(values.max()) <= legal.max)
        return values.astype(dtype) if inside else values

    def narrow(values: np.ndarray | None, dtype: type[np.floating]) -> np.ndarray | None:
        with np.errstate(over="ignore"):
            return None if values is None else values.astype(dtype, copy=False)

    experts = fit(row.experts, np.int16)
    assert experts is not None
    return replace(
        row,
        experts=experts,
        token_ids=fit(row.token_ids, np.int32),
        weights=narrow(row.weights, np.float16),
        scores=narrow(row.scores, np.float32),
        hidden=narrow(row.hidden, np.float16),
    )


def split_parts(row: SequenceRouting) -> list[SequenceRouting]:
    """Cut a row into parts of at most PART_TOKENS tokens, as views; the first keeps the row's part number and text."""
    if row.num_tokens <= PART_TOKENS:
        return [row]
    parts = []
    for number, start in enumerate(range(0, row.num_tokens, PART_TOKENS)):
        cut = slice(start, start + PART_TOKENS)
        parts.append(
            replace(
                row,
                part=row.part + number,
                experts=row.experts[cut],
                token_ids=None if row.token_ids is None else row.token_ids[cut],
                weights=None if row.weights is None else row.weights[cut],
                scores=None if row.scores is None else row.scores[cut],
                hidden=None if row.hidden is None else row.hidden[cut],
                text=row.text if number == 0 else None,
            )
        )
    return parts


def join_parts(rows: Iterable[SequenceRouting]) -> Iterator[SequenceRouting]:
    """Join each sequence's parts into one row; at most one sequence is held at a time.

    Raises:
        TraceError: if a part is missing or out of order.
    """
    held: list[SequenceRouting] = []
    for row in rows:
        follows = bool(held) and (row.sequence, row.stack) == (held[0].sequence, held[0].stack)
        if held and not (follows and row.part == held[-1].part + 1):
            yield _joined(held)
            held = []
        if not held and row.part != 0:
            raise TraceError(
                f"Part {row.part} of sequence {row.sequence!r} ({row.stack}) does not follow part {row.part - 1}; "
                "record or import the trace again."
            )
        held.append(row)
    if held:
        yield _joined(held)


def _joined(rows: list[SequenceRouting]) -> SequenceRouting:
    if len(rows) == 1:
        return rows[0]

    def together(name: str) -> np.ndarray | None:
        values = [getattr(row, name) for row in rows]
        return None if any(value is None for value in values) else np.concatenate(values)

    experts = together("experts")
    assert experts is not None
    others = {name: together(name) for name in ("token_ids", "weights", "scores", "hidden")}
    return replace(rows[0], experts=experts, **others)  # type: ignore[arg-type]
