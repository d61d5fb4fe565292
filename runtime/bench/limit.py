"""The physical limit of a run: what perfect knowledge and a busy link would have taken. Knows events and seconds."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence

from ..clock import Clock, SystemClock
from ..replay import Event, replay_belady
from ..slots import SlotArena
from ..transfer import BlockSource, ThreadedTransfers, TransferEngine

PROBE_BLOCKS = 16  # about 0.1 s of reading at 1 GB/s and 6 MiB


class LinkProbe:
    """Measure how long one expert takes to read when the link is kept busy, with the store's own block size.

    Reads go into slots of its own that were touched before, through the same reader and as many threads as an arm has.
    """

    def __init__(self, store: BlockSource, reader, num_threads: int = 2, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._arena = SlotArena(2 * num_threads, store.block_bytes)
        self._transfers: TransferEngine = ThreadedTransfers(
            store, self._arena.buffer, reader, num_threads=num_threads, clock=self._clock
        )
        self._random = random.Random(0)
        self._experts = store.topology.num_experts
        self.seconds_per_block: list[float] = []

    def __call__(self) -> None:
        """Probe once."""
        free = list(range(self._arena.num_slots))
        todo = [self._random.randrange(self._experts) for _ in range(PROBE_BLOCKS)]
        pending = []
        start = self._clock.now()
        while todo or pending:
            while todo and free:
                pending.append(self._transfers.submit(todo.pop(), free.pop(), demand=True))
            done = self._transfers.wait_any(pending)
            pending.remove(done)
            free.append(done.slot)
        self.seconds_per_block.append((self._clock.now() - start) / PROBE_BLOCKS)

    @property
    def median_s(self) -> float:
        """Median seconds per block over all probes."""
        return statistics.median(self.seconds_per_block)

    def close(self) -> None:
        """Join the probe's threads."""
        self._transfers.close()


def limit_s(events: Sequence[Event], capacity: int, compute_s: float, block_s: float) -> float:
    """Give max(resident compute time, Belady misses of the events x seconds per block)."""
    return max(compute_s, replay_belady(events, capacity).misses * block_s)
