"""The order of training: batches of chunks of similar length, block by block, dealt out to ranks, resumable.

Every epoch has each chunk exactly once and the same number of batches, so that progress and resuming can count them.
A trace that is larger than memory is cut into stretches; an epoch draws some at random into a block that fits, goes
through it, and draws the next. Knows lengths and places; knows no traces.
"""

# C chunks

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch.utils.data import DataLoader, Sampler

from ..collect.errors import DataError
from .batch import Chunks

JITTER = 0.2  # share by which lengths are blurred before sorting, so that batches differ between epochs
SPARE = 0.03  # share of batches by which an unlucky epoch may need more than the plain order does


class LengthSampler(Sampler):
    """Give batches of chunks of similar length, at most `batch_tokens` with their padding, in a seeded order.

    Args:
        lengths: tokens of each chunk, int64 [C].
        batch_tokens: most tokens of a batch.
        seed: of the order; none keeps the longest first and the stretches in the order of the trace.
        stretches: number of each chunk's stretch, int64 [C]; one for all where not given.
        block: stretches that are gone through together.
        rank, world: of this process and how many share the batches.
        position: gives how many batches of all epochs this rank is through; without it, `set_epoch` chooses the epoch
            and each starts at its beginning.
    """

    def __init__(
        self,
        lengths: np.ndarray,
        batch_tokens: int,
        seed: int | None,
        *,
        stretches: np.ndarray | None = None,
        block: int = 1,
        rank: int = 0,
        world: int = 1,
        position: Callable[[], int] | None = None,
    ) -> None:
        self.lengths, self.batch_tokens, self.seed, self.epoch = lengths, batch_tokens, seed, 0
        self.stretches = np.zeros(len(lengths), np.int64) if stretches is None else stretches
        self.block, self.rank, self.world, self.position = block, rank, world, position
        if seed is not None and len(lengths) < world:
            raise DataError(
                f"{world} processes cannot share {len(lengths)} pieces of training sequences; start at most "
                f"{len(lengths)}, or make data.chunk_tokens smaller."
            )
        self._num_batches = self._count()

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of an epoch."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        epoch, before = (self.epoch, 0) if self.position is None else divmod(self.position(), len(self))
        batches = self._batches(epoch)
        if len(batches) >= self.world:  # else there is too little to share: each rank goes through all of it
            batches = batches[self.rank :: self.world]
        yield from batches[before:]

    def __len__(self) -> int:
        """Batches of this rank in any epoch."""
        if self._num_batches < self.world:
            return self._num_batches
        return len(range(self.rank, self._num_batches, self.world))

    def _count(self) -> int:
        plain = sum(len(_packed(part, self.lengths[part], self.lengths, self.batch_tokens)) for part in self._blocks())
        if self.seed is None:
            return plain
        wanted = plain + int(np.ceil(SPARE * plain)) if plain > 1 else plain
        wanted = min(len(self.lengths), -(-wanted // self.world) * self.world)
        return max(self.world, wanted // self.world * self.world)  # ranks step together: each has as many

    def _blocks(self, rng: np.random.Generator | None = None) -> list[np.ndarray]:
        """Give the chunks of each block."""
        names, first = np.unique(self.stretches), np.argsort(self.stretches, kind="stable")
        members = np.split(first, np.searchsorted(self.stretches[first], names)[1:])
        order = np.arange(len(names))
        if rng is not None and len(names) > self.block:
            rng.shuffle(order)
        starts = range(0, len(order), self.block)
        return [np.sort(np.concatenate([members[n] for n in order[at : at + self.block]])) for at in starts]

    def _batches(self, epoch: int) -> list[list[int]]:
        if self.seed is None:
            blocks = self._blocks()
            return [b for part in blocks for b in _packed(part, self.lengths[part], self.lengths, self.batch_tokens)]
        jitter = JITTER
        while True:
            rng = np.random.default_rng([self.seed, epoch])
            batches: list[list[int]] = []
            for part in self._blocks(rng):
                blurred = self.lengths[part] * rng.uniform(1 - jitter, 1.0, len(part))
                found = _packed(part, blurred, self.lengths, self.batch_tokens)
                rng.shuffle(found)
                batches += found
            if len(batches) <= self._num_batches or jitter < 1e-3:
                return self._exactly(batches)
            jitter /= 2

    def _exactly(self, batches: list[list[int]]) -> list[list[int]]:
        """Halve the batches of most chunks, or join neighbours, until there are as many as in any epoch."""
        while len(batches) < self._num_batches:
            place = max(range(len(batches)), key=lambda index: len(batches[index]))
            batch = batches[place]
            batches[place : place + 1] = [batch[: len(batch) // 2], batch[len(batch) // 2 :]]
        while len(batches) > self._num_batches:
            place = min(range(len(batches) - 1), key=lambda index: len(batches[index]) + len(batches[index + 1]))
            batches[place : place + 2] = [batches[place] + batches[place + 1]]
        return batches


def _packed(chunks: np.ndarray, keys: np.ndarray, lengths: np.ndarray, batch_tokens: int) -> list[list[int]]:
    """Fill batches with chunks in falling order of their keys."""
    batches: list[list[int]] = [[]]
    longest = 0
    for index in chunks[np.argsort(-keys, kind="stable")].tolist():
        longest = max(longest, int(lengths[index]))
        if batches[-1] and longest * (len(batches[-1]) + 1) > batch_tokens:
            batches.append([])
            longest = int(lengths[index])
        batches[-1].append(index)
    return batches


class ResumableLoader(DataLoader):
    """Load batches in this process; the sampler knows where to go on, so a checkpoint keeps nothing of it.

    The process's random numbers are left alone: a generator of its own gives the seed that workers would get.
    """

    def __init__(self, chunks: Chunks, sampler: LengthSampler) -> None:
        super().__init__(
            chunks, batch_sampler=sampler, collate_fn=chunks.collate, generator=torch.Generator().manual_seed(0)
        )

    def state_dict(self) -> dict[str, int]:
        """Give nothing; that there is such a method tells Lightning that an epoch can go on in its middle."""
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Take nothing."""
