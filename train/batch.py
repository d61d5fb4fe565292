"""Batches of recorded routing: sequences cut into chunks, padded to the longest. Knows rows of traces, no predictor.

Many-hot vectors are made later, per batch; here experts are the trace's own small integers (2 bytes per choice).
"""

# B batch, T tokens, L MoE layers of the stack, E experts of the largest, K experts per token, C chunks

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from ..collect.errors import DataError
from ..collect.topology import MoeTopology
from ..collect.trace import SequenceRouting
from ..predictors.rows import dense, ids_of
from .lazy_rows import Rows


class Batch(NamedTuple):
    """Chunks of sequences, padded to the longest."""

    ids: Tensor
    """int64 [B, T]; -1 on padding and where the trace has no ids."""
    experts: Tensor
    """int16 [B, T, L, K]; -1 = none."""
    before: Tensor
    """int16 [B, L, K]: experts of the token before the chunk; -1 at the start of a sequence."""
    after: Tensor
    """int16 [B, F, L, K]: experts of the tokens after the chunk; -1 beyond the end of the sequence."""
    mask: Tensor
    """bool [B, T]: False on padding."""
    scored: Tensor
    """bool [B, T]: tokens that count, neither padding nor context repeated from the chunk before."""
    first: Tensor
    """bool [B]: whether the chunk starts its sequence."""
    scores: Tensor | None = None
    """float32 [B, T, L, E]: what the router's top-k chose from, as recorded; 0 on padding and where a smaller layer has
    no such expert. None where the trace has no scores, or nobody asked for them."""


class Chunk(NamedTuple):
    """Tokens start..stop of a row, of which the first `context` only warm up the state."""

    row: int
    start: int
    stop: int
    context: int


class Chunks(Dataset):
    """Cut rows into chunks of at most `chunk_tokens`, each preceded by up to `context_tokens` of what came before."""

    def __init__(
        self,
        rows: Rows,
        chunk_tokens: int,
        context_tokens: int,
        after_tokens: int = 0,
        scores: bool = False,
    ) -> None:
        self.rows, self.topology = rows, rows.source.trace.topology
        self.after_tokens, self.with_scores = after_tokens, scores
        self._row_lengths = rows.lengths
        counts = -(-self._row_lengths // chunk_tokens)
        row_C = np.repeat(np.arange(len(rows)), counts)
        start_C = (np.arange(len(row_C)) - np.repeat(np.cumsum(counts) - counts, counts)) * chunk_tokens
        self.chunks = np.stack(
            [
                row_C,
                np.maximum(0, start_C - context_tokens),
                np.minimum(start_C + chunk_tokens, self._row_lengths[row_C]),
                np.minimum(start_C, context_tokens),
            ],
            axis=1,
        )
        """int64 [C, 4], the fields of `Chunk`."""

    def __len__(self) -> int:
        return len(self.chunks)

    def __getitem__(self, index: int) -> Chunk:
        return Chunk(*self.chunks[index].tolist())

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each chunk, int64 [C]."""
        return self.chunks[:, 2] - self.chunks[:, 1]

    def collate(self, chunks: list[Chunk]) -> Batch:
        """Pad chunks into a batch.

        Raises:
            DataError: if scores are wanted and missing or no numbers.
        """
        longest = max(chunk.stop - chunk.start for chunk in chunks)
        shape, cells = (len(chunks), longest), _cells(self.topology, self.rows)
        ids, mask, scored = np.full(shape, -1, np.int64), np.zeros(shape, bool), np.zeros(shape, bool)
        experts = np.full((*shape, *cells[:2]), -1, np.int16)
        before = np.full((len(chunks), *cells[:2]), -1, np.int16)
        after = np.full((len(chunks), self.after_tokens, *cells[:2]), -1, np.int16)
        scores = np.zeros((*shape, cells[0], cells[2]), np.float32) if self.with_scores else None
        for place, (row, start, stop, context) in enumerate(chunks):
            low, high = max(0, start - 1), min(stop + self.after_tokens, int(self._row_lengths[row]))
            around, length, own = self.rows.span(row, low, high), stop - start, slice(start - low, stop - low)
            around_TLK = dense(around, self.topology)
            ids[place, :length], experts[place, :length] = ids_of(around)[own], around_TLK[own]
            mask[place, :length], scored[place, context:length] = True, True
            if start:
                before[place] = around_TLK[0]
            following = around_TLK[stop - low :]
            after[place, : len(following)] = following
            if scores is not None:
                scores[place, :length] = dense_scores(around, self.topology, low)[own]
        first = np.array([chunk.start == 0 for chunk in chunks])
        return Batch(
            *map(torch.from_numpy, (ids, experts, before, after, mask, scored, first)),
            scores=None if scores is None else torch.from_numpy(scores),
        )


def _cells(topology: MoeTopology, rows: Rows) -> tuple[int, int, int]:
    """Give layers, experts per token and experts of the largest layer of the rows' stack."""
    layers = [topology.layers[index] for index in topology.layers_of(rows.source.stack)]
    return len(layers), max(layer.top_k for layer in layers), max(layer.num_experts for layer in layers)


def dense_scores(row: SequenceRouting, topology: MoeTopology, first: int = 0) -> np.ndarray:
    """Give a row's scores as float32 [T, L, E], 0 where a smaller layer has no such expert.

    `first` is the number of its first token in the sequence.

    Raises:
        DataError: if the row has none, or one of them is no number.
    """
    layers = topology.layers_of(row.stack)
    sizes = [topology.layers[index].num_experts for index in layers]
    if row.scores is None:
        raise DataError(
            f"Sequence {row.sequence!r} has no router scores, though its trace declares them; run foregate validate "
            "and record the trace again."
        )
    if np.isnan(row.scores).any():
        token = first + int(np.argwhere(np.isnan(row.scores))[0][0])
        raise DataError(
            f"The router scores of sequence {row.sequence!r} are no numbers at token {token}; run foregate validate "
            "and record the trace again."
        )
    if len(set(sizes)) == 1:
        return row.scores.reshape(row.num_tokens, len(layers), sizes[0])
    out = np.zeros((row.num_tokens, len(layers), max(sizes)), np.float32)
    for index, (start, stop) in enumerate(pairwise([0, *accumulate(sizes)])):
        out[:, index, : stop - start] = row.scores[:, start:stop]
    return out
