"""A trace as training sees it: its sequences split by group, its batches in order.

Knows traces and batches; knows no predictor. The trace is gone through once for its index; its rows are read when they
are needed, and at most `memory_mib` of them are kept, so that a trace may be larger than memory.
"""

from __future__ import annotations

import functools
import logging
from pathlib import Path
from typing import get_args

import lightning as L
import numpy as np

from ..collect.errors import DataError, SettingError
from ..collect.token_texts import read_token_texts, texts_beside
from ..collect.topology import STACKS, Stack
from ..collect.trace import SequenceRouting, Trace, TraceHeader
from ..predictors.rows import fingerprint, group_of
from .batch import Batch, Chunk, Chunks, dense_scores
from .lazy_rows import Rows
from .row_source import RowSource
from .sampler import LengthSampler, ResumableLoader
from .split import Part, SplitSettings, split_groups

__all__ = ["Batch", "Chunk", "Chunks", "LengthSampler", "TraceData", "dense_scores"]

log = logging.getLogger(__name__)

MEMORY_MIB = 1024
MOST_IDS = 1 << 24  # sixty times the largest vocabulary in use; a lookup of as many ids takes 128 MiB
STRETCHES = 16  # of one block: enough that a block is a fair sample, long enough that few row groups are read twice


class TraceData(L.LightningDataModule):
    """Feed one stack of a trace to training.

    Args:
        trace: a trace folder or an .npz file.
        stack: stack whose layers are predicted; the trace's only one, or its encoder, where not given.
        split: how sequences are dealt out to training, validation and test.
        chunk_tokens: longest piece of a sequence in a training batch.
        context_tokens: tokens before a piece that warm up the state without counting.
        batch_tokens: tokens of a training batch, padding included.
        memory_mib: most memory for decoded sequences; a larger trace is read, and shuffled, block by block.
        token_texts: the texts of the model's token ids, by which unseen ones are known: a tokenizer (folder or name on
            the hub), or a JSON file; what stands beside an .npz trace where not given.
    """

    def __init__(
        self,
        trace: str | Path,
        stack: Stack | None = None,
        split: SplitSettings | None = None,
        chunk_tokens: int = 256,
        context_tokens: int = 64,
        batch_tokens: int = 2048,
        memory_mib: float = MEMORY_MIB,
        token_texts: str | None = None,
    ) -> None:
        super().__init__()
        for name, value, least in (
            ("chunk_tokens", chunk_tokens, 2),
            ("context_tokens", context_tokens, 0),
            ("batch_tokens", batch_tokens, 1),
        ):
            if value < least:
                raise SettingError(f"{name} must be at least {least}, got {value}.")
        if not 0 < memory_mib < float("inf"):
            raise SettingError(f"memory_mib must be positive, got {memory_mib}.")
        self.trace_path, self.split, self.memory_mib = Path(trace), split or SplitSettings(), memory_mib
        self.chunk_tokens, self.context_tokens, self.batch_tokens = chunk_tokens, context_tokens, batch_tokens
        self.token_texts = token_texts
        self.after_tokens = 0  # tokens after a chunk that its batch also shows; the network's discount decides
        self.rows: dict[Part, Rows] = {}
        self._wanted = stack
        self._source: RowSource | None = None

    def setup(self, stage: str | None = None) -> None:
        """Go through the trace and deal its sequences out; a second call does nothing.

        Raises:
            TraceError: if there is no such trace, or it is damaged.
            DataError: if it lacks the stack, has too few sequences to split, or one token id for all tokens.
        """
        if self._source is not None:
            return
        trace = Trace.open(self.trace_path)
        stack = self._wanted or trace.topology.stacks[0]
        if stack not in trace.topology.stacks:
            legal = ", ".join(trace.topology.stacks)
            raise DataError(f"{self.trace_path} has no stack {stack!r}; its stacks are {legal}.")
        assert stack in STACKS
        source = RowSource(trace, stack, int(self.memory_mib * 2**20))
        everything = Rows(source, np.arange(len(source)))
        if source.highest_id >= MOST_IDS:
            raise DataError(
                f"{self.trace_path} has the token id {source.highest_id}; ids below {MOST_IDS} are legal, since an "
                "embedding has a place for each: record or import it with the tokenizer's own ids."
            )
        names = [self._dealt_as(row) for row in everything]
        parts = split_groups(names, self.split)
        if source.num_ids and source.lowest_id == source.highest_id:
            raise DataError(
                f"All {source.num_ids} tokens of {self.trace_path} have the id {source.highest_id}, so nothing can be "
                "learned from them; record it with a working tokenizer, or import it without token ids."
            )
        dealt = np.array([parts[name] for name in names])
        for part in get_args(Part):
            self.rows[part] = Rows(source, np.flatnonzero(dealt == part))
        self.stack: Stack = stack
        self._source = source

    def _dealt_as(self, row: SequenceRouting) -> str:
        """Give the name of what stays together in the split."""
        if self.split.by == "group":
            return group_of(row)
        if row.category is None:
            raise DataError(
                f"Sequence {row.sequence!r} of {self.trace_path} has no category, and data.split.by is category; split "
                "by group, or record or import the trace with its categories."
            )
        return row.category

    def leave_out(self, seen: np.ndarray) -> None:
        """Take test sequences out whose fingerprints are among `seen`: a predictor learned from them before.

        Raises:
            DataError: if none is left.
        """
        self.setup()
        test, known = self.rows["test"], set(seen.tolist())
        if not known:
            return
        fresh = np.array([fingerprint(row) not in known for row in test], bool)
        if not fresh.any():
            raise DataError(
                f"The predictor has learned from all {len(test)} test sequences of {self.trace_path} before; give "
                "another trace, or the data.split that it was trained with."
            )
        self.rows["test"] = Rows(test.source, test.numbers[fresh])

    @property
    def source(self) -> RowSource:
        """The indexed trace."""
        self.setup()
        assert self._source is not None
        return self._source

    @property
    def header(self) -> TraceHeader:
        """What the trace says of its model."""
        return self.source.trace.header

    @property
    def fitting_rows(self) -> Rows:
        """Rows that training may learn from in any way: training and validation."""
        self.setup()
        return self.rows["training"] + self.rows["validation"]

    @functools.cached_property
    def texts(self) -> tuple[str, ...] | None:
        """The text of every token id from 0 on, None where it is not known.

        Raises:
            DataError, ModelError: if what was named has no texts.
        """
        source = self.token_texts or texts_beside(self.trace_path)
        if source is None or self.source.num_ids == 0:
            return None
        found = read_token_texts(source)
        log.info("%d token ids are known by their texts (%s)", len(found), source)
        return found[: self.vocab_size]

    @property
    def vocab_size(self) -> int:
        """Token ids of the model: the header's number, else one more than the largest id of the trace."""
        return self.source.highest_id + 1 if self.header.vocab_size is None else self.header.vocab_size

    @property
    def has_scores(self) -> bool:
        """Whether the trace says what its routers' top-k chose from."""
        return self.header.scores == "selection"

    @property
    def with_scores(self) -> bool:
        """Whether batches show the routers' scores, where the trace has them; they are not read before it is set."""
        return self.source.scores

    @with_scores.setter
    def with_scores(self, wanted: bool) -> None:
        self.source.scores = wanted and self.has_scores

    def _loader(self, part: Part, chunk_tokens: int, batch_tokens: int, seed: int | None) -> ResumableLoader:
        rows, source = self.rows[part], self.source
        chunks = Chunks(rows, chunk_tokens, self.context_tokens, self.after_tokens, self.with_scores)
        # half of the memory for the block that is gone through, the rest for row groups that reach beyond it
        stretch_tokens = max(1, int(source.memory_bytes / 2 / STRETCHES / source.bytes_per_token))
        all_fits = int(source.lengths_N.sum()) <= stretch_tokens * STRETCHES
        stretch_of_row = source.start_N[rows.numbers] // stretch_tokens * (not all_fits)
        sampler = LengthSampler(
            chunks.lengths,
            batch_tokens,
            seed,
            stretches=stretch_of_row[chunks.chunks[:, 0]],
            block=STRETCHES,
            rank=self.trainer.global_rank if self.trainer else 0,
            world=self.trainer.world_size if self.trainer else 1,
            position=self._steps if seed is not None and self.trainer and self.trainer.training else None,
        )
        return ResumableLoader(chunks, sampler)

    def _steps(self) -> int:
        """Give the batches that training is through: one step each."""
        return self.trainer.global_step if self.trainer else 0

    def train_dataloader(self) -> ResumableLoader:
        """Give the training batches, in another order each epoch."""
        self.setup()
        return self._loader("training", self.chunk_tokens, self.batch_tokens, self.split.seed)

    def val_dataloader(self) -> ResumableLoader:
        """Give the validation batches, sequences cut only where they are very long."""
        self.setup()
        return self._loader("validation", max(4096, self.chunk_tokens), max(8192, self.batch_tokens), None)
