"""Batches of recorded routing for training: a trace's sequences, split by group, cut into chunks.

Knows traces and batches; knows no predictor. A trace is read once, shard by shard; ids and experts stay in memory as
the trace's own small integers (2 bytes per chosen expert), many-hot vectors are made per batch.
"""

# B batch, T tokens, L MoE layers of the stack, E experts of the largest, K experts per token

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, pairwise
from pathlib import Path
from typing import NamedTuple

import lightning as L
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from ..collect.errors import DataError, SettingError
from ..collect.topology import STACKS, MoeTopology, Stack
from ..collect.trace import SequenceRouting, Trace, TraceHeader
from ..predictors.rows import dense, group_of, ids_of, join_parts
from .split import Part, SplitSettings, split_groups


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
        rows: list[SequenceRouting],
        trace: Trace,
        chunk_tokens: int,
        context_tokens: int,
        after_tokens: int = 0,
        scores: bool = False,
    ) -> None:
        self.after_tokens = after_tokens
        self.ids = [ids_of(row) for row in rows]
        self.experts = [dense(row, trace.topology) for row in rows]
        self.scores = [dense_scores(row, trace.topology) for row in rows] if scores else None
        self.chunks = [
            Chunk(index, max(0, start - context_tokens), min(start + chunk_tokens, length), min(start, context_tokens))
            for index, length in enumerate(map(len, self.experts))
            for start in range(0, length, chunk_tokens)
        ]

    def __len__(self) -> int:
        return len(self.chunks)

    def __getitem__(self, index: int) -> Chunk:
        return self.chunks[index]

    def collate(self, chunks: list[Chunk]) -> Batch:
        """Pad chunks into a batch."""
        longest = max(chunk.stop - chunk.start for chunk in chunks)
        shape = (len(chunks), longest)
        ids, mask, scored = np.full(shape, -1, np.int64), np.zeros(shape, bool), np.zeros(shape, bool)
        experts = np.full((*shape, *self.experts[0].shape[1:]), -1, np.int16)
        before = np.full((len(chunks), *self.experts[0].shape[1:]), -1, np.int16)
        after = np.full((len(chunks), self.after_tokens, *self.experts[0].shape[1:]), -1, np.int16)
        for place, (row, start, stop, context) in enumerate(chunks):
            ids[place, : stop - start] = self.ids[row][start:stop]
            experts[place, : stop - start] = self.experts[row][start:stop]
            mask[place, : stop - start] = True
            scored[place, context : stop - start] = True
            if start:
                before[place] = self.experts[row][start - 1]
            following = self.experts[row][stop : stop + self.after_tokens]
            after[place, : len(following)] = following
        first = np.array([chunk.start == 0 for chunk in chunks])
        return Batch(
            *map(torch.from_numpy, (ids, experts, before, after, mask, scored, first)),
            scores=self._scores(chunks, longest),
        )

    def _scores(self, chunks: list[Chunk], longest: int) -> Tensor | None:
        if self.scores is None:
            return None
        out = np.zeros((len(chunks), longest, *self.scores[0].shape[1:]), np.float32)
        for place, (row, start, stop, _) in enumerate(chunks):
            out[place, : stop - start] = self.scores[row][start:stop]
        return torch.from_numpy(out)


def dense_scores(row: SequenceRouting, topology: MoeTopology) -> np.ndarray:
    """Give a row's scores as float32 [T, L, E], 0 where a smaller layer has no such expert.

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
        token = int(np.argwhere(np.isnan(row.scores))[0][0])
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


class LengthSampler(Sampler):
    """Give batches of chunks of similar length, at most `batch_tokens` with their padding, in a seeded order."""

    def __init__(self, chunks: list[Chunk], batch_tokens: int, seed: int | None) -> None:
        self.lengths = np.array([chunk.stop - chunk.start for chunk in chunks])
        self.batch_tokens, self.seed, self.epoch = batch_tokens, seed, 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of an epoch; Lightning calls it."""
        self.epoch = epoch

    def _batches(self) -> list[list[int]]:
        lengths = self.lengths.astype(float)
        rng = None if self.seed is None else np.random.default_rng([self.seed, self.epoch])
        if rng is not None:
            lengths = lengths * rng.uniform(0.8, 1.0, len(lengths))  # so that batches differ between epochs
        batches: list[list[int]] = [[]]
        longest = 0
        for index in np.argsort(-lengths, kind="stable").tolist():
            longest = max(longest, int(self.lengths[index]))
            if batches[-1] and longest * (len(batches[-1]) + 1) > self.batch_tokens:
                batches.append([])
                longest = int(self.lengths[index])
            batches[-1].append(index)
        if rng is not None:
            rng.shuffle(batches)
        return batches

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self._batches())

    def __len__(self) -> int:
        return len(self._batches())


class TraceData(L.LightningDataModule):
    """Feed one stack of a trace to training.

    Args:
        trace: a trace folder or an .npz file.
        stack: stack whose layers are predicted; the trace's only one, or its encoder, where not given.
        split: how sequences are dealt out to training, validation and test.
        chunk_tokens: longest piece of a sequence in a training batch.
        context_tokens: tokens before a piece that warm up the state without counting.
        batch_tokens: tokens of a training batch, padding included.
    """

    def __init__(
        self,
        trace: str | Path,
        stack: Stack | None = None,
        split: SplitSettings | None = None,
        chunk_tokens: int = 512,
        context_tokens: int = 64,
        batch_tokens: int = 2048,
    ) -> None:
        super().__init__()
        for name, value, least in (
            ("chunk_tokens", chunk_tokens, 2),
            ("context_tokens", context_tokens, 0),
            ("batch_tokens", batch_tokens, 1),
        ):
            if value < least:
                raise SettingError(f"{name} must be at least {least}, got {value}.")
        self.trace_path, self.split = Path(trace), split or SplitSettings()
        self.chunk_tokens, self.context_tokens, self.batch_tokens = chunk_tokens, context_tokens, batch_tokens
        self.after_tokens = 0  # tokens after a chunk that its batch also shows; the network's discount decides
        self.with_scores = False  # whether batches show the router's scores, where the trace has them
        self.rows: dict[Part, list[SequenceRouting]] = {}
        self._wanted = stack
        self._source: Trace | None = None

    def setup(self, stage: str | None = None) -> None:
        """Read the trace and deal its sequences out; a second call does nothing.

        Raises:
            TraceError: if there is no such trace.
            DataError: if it lacks the stack or has too few sequences to split.
        """
        if self._source is not None:
            return
        trace = Trace.open(self.trace_path)
        stack = self._wanted or trace.topology.stacks[0]
        if stack not in trace.topology.stacks:
            legal = ", ".join(trace.topology.stacks)
            raise DataError(f"{self.trace_path} has no stack {stack!r}; its stacks are {legal}.")
        assert stack in STACKS
        rows = [row for row in join_parts(trace.rows(stack)) if row.num_tokens > 1]
        parts = split_groups(map(group_of, rows), self.split)
        self.rows = {"training": [], "validation": [], "test": []}
        for row in rows:
            self.rows[parts[group_of(row)]].append(row)
        self.stack: Stack = stack
        self._source = trace

    @property
    def source(self) -> Trace:
        """The opened trace."""
        self.setup()
        assert self._source is not None
        return self._source

    @property
    def header(self) -> TraceHeader:
        """What the trace says of its model."""
        return self.source.header

    @property
    def fitting_rows(self) -> list[SequenceRouting]:
        """Rows that training may learn from in any way: training and validation."""
        self.setup()
        return self.rows["training"] + self.rows["validation"]

    @property
    def vocab_size(self) -> int:
        """Token ids of the model: the header's number, else one more than the largest id of the trace."""
        if self.header.vocab_size is not None:
            return self.header.vocab_size
        return 1 + max((int(ids_of(row).max(initial=-1)) for rows in self.rows.values() for row in rows), default=-1)

    @property
    def has_scores(self) -> bool:
        """Whether the trace says what its routers' top-k chose from."""
        return self.header.scores == "selection"

    def _loader(self, part: Part, chunk_tokens: int, batch_tokens: int, seed: int | None) -> DataLoader:
        self.setup()
        scores = self.with_scores and self.has_scores
        data = Chunks(self.rows[part], self.source, chunk_tokens, self.context_tokens, self.after_tokens, scores)
        sampler = LengthSampler(data.chunks, batch_tokens, seed)
        return DataLoader(data, batch_sampler=sampler, collate_fn=data.collate)

    def train_dataloader(self) -> DataLoader:
        """Give the training batches, in another order each epoch."""
        return self._loader("training", self.chunk_tokens, self.batch_tokens, self.split.seed)

    def val_dataloader(self) -> DataLoader:
        """Give the validation batches, sequences cut only where they are very long."""
        return self._loader("validation", max(4096, self.chunk_tokens), max(8192, self.batch_tokens), None)
