"""Filling slots from a store: demands before prefetches. Knows bytes and slots; knows nothing of caches or models.

Threads: one compute thread calls `submit`, `promote`, `cancel`, `wait_any`; worker threads only read into slots.
Guarantees:
  - a transfer is `done()` once, and from then on no worker touches its slot; a cancelled one that was being read is
    done at its next piece, and a new transfer into the same slot starts only after that;
  - queues are bounded by the slots: a slot has at most one transfer that was not cancelled;
  - one lock, held for O(queue) work, never across a read; workers sleep on a condition, nothing polls;
  - a failed demand raises in `wait_any`, with expert, file and offset; a failed prefetch is counted and carries its
    error.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Protocol, Self, runtime_checkable

from ..collect.errors import SettingError, TransferError
from ..collect.topology import MoeTopology
from .blocks import ALIGNMENT
from .clock import Clock, SystemClock
from .readers import Reader
from .store import ExpertStore, Segment
from .transfer_queue import Piece, Transfer, TransferQueue, TransferStats

__all__ = ["InlineTransfers", "ThreadedTransfers", "Transfer", "TransferEngine", "TransferStats"]

SlotBuffer = Callable[[int], memoryview]


class BlockSource(Protocol):
    """Where experts' bytes are: a store, or blocks that a benchmark made up."""

    @property
    def block_bytes(self) -> int:
        """Bytes of the largest block."""
        ...

    @property
    def topology(self) -> MoeTopology:
        """Whose experts they are."""
        ...

    def segments(self, flat: int, /) -> Sequence[Segment]:
        """Give the byte ranges of an expert (flat index)."""
        ...


@runtime_checkable
class TransferEngine(Protocol):
    """Fill slots with experts."""

    def submit(self, expert: int, slot: int, *, demand: bool) -> Transfer:
        """Queue a transfer of an expert (flat index) into a slot.

        Raises:
            ClosedError: after `close`.
            ValueError: if the slot has a transfer that is neither done nor cancelled.
        """
        ...

    def promote(self, transfer: Transfer) -> None:
        """Turn a prefetch into a demand: it keeps what it has read and goes on at once; `wait_any` raises its error."""
        ...

    def cancel(self, transfer: Transfer) -> bool:
        """Drop a transfer and say whether that was before it was done.

        Its slot may be given to a new transfer at once; a worker in the middle of a piece ends that first.
        """
        ...

    def wait_any(self, transfers: Sequence[Transfer]) -> Transfer:
        """Wait until one is done and give it; a failed demand raises its error, a failed prefetch is given."""
        ...

    def stats(self) -> TransferStats:
        """Give a snapshot of the numbers so far."""
        ...

    def close(self) -> None:
        """Drop what is queued, let running pieces end and join every thread; a second call does nothing."""
        ...


class ThreadedTransfers:
    """Read with worker threads.

    Args:
        store: where the experts' bytes are.
        slot_buffer: gives a slot as writable memory, aligned to 4096 and at least `store.block_bytes` long.
        reader: how the store's files are read; its owner closes it, after this engine.
        num_threads: workers; two read 6 MiB blocks a quarter faster than one, four no faster than two.
        chunk_bytes: piece of a prefetch, what a demand may have to wait for; 1 MiB reads as fast as larger pieces.
    """

    def __init__(
        self,
        store: BlockSource,
        slot_buffer: SlotBuffer,
        reader: Reader,
        num_threads: int = 2,
        chunk_bytes: int = 1 << 20,
        clock: Clock | None = None,
    ) -> None:
        if num_threads < 1:
            raise SettingError(f"num_threads must be at least 1, got {num_threads}.")
        if chunk_bytes < ALIGNMENT or chunk_bytes % ALIGNMENT:
            raise SettingError(f"chunk_bytes must be a positive multiple of {ALIGNMENT}, got {chunk_bytes}.")
        self._store, self._slot_buffer, self._reader = store, slot_buffer, reader
        self._queue = TransferQueue(clock or SystemClock(), num_readers=num_threads, chunk_bytes=chunk_bytes)
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)  # something may have become readable
        self._settled = threading.Condition(self._lock)  # a transfer is done
        self._threads = [
            threading.Thread(target=self._run, name=f"foregate-transfer-{index}", daemon=True)
            for index in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, expert: int, slot: int, *, demand: bool) -> Transfer:
        """Queue a transfer; see TransferEngine."""
        segments = self._store.segments(expert)
        with self._lock:
            transfer = self._queue.add(expert, slot, segments, demand=demand)
            self._work.notify_all()
            return transfer

    def promote(self, transfer: Transfer) -> None:
        """Turn a prefetch into a demand; see TransferEngine."""
        with self._lock:
            self._queue.promote(transfer)
            self._work.notify_all()

    def cancel(self, transfer: Transfer) -> bool:
        """Drop a transfer; see TransferEngine."""
        with self._lock:
            dropped = self._queue.cancel(transfer)
            self._settled.notify_all()
            self._work.notify_all()  # a dropped demand lets the prefetches go on
            return dropped

    def wait_any(self, transfers: Sequence[Transfer]) -> Transfer:
        """Wait until one is done; see TransferEngine."""
        if not transfers:
            raise ValueError("wait_any needs at least one transfer, got none")
        with self._lock:
            while True:
                for transfer in transfers:
                    if transfer.done():
                        return _checked(transfer)
                self._settled.wait()

    def stats(self) -> TransferStats:
        """Give a snapshot of the numbers so far."""
        with self._lock:
            return self._queue.stats()

    def close(self) -> None:
        """Drop what is queued, let running pieces end and join the workers; a second call does nothing."""
        with self._lock:
            self._queue.close()
            self._work.notify_all()
            self._settled.notify_all()
        for thread in self._threads:
            thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self) -> None:
        while True:
            with self._lock:
                while (piece := self._queue.take()) is None:
                    if self._queue.closed:
                        return
                    self._work.wait()
            error = self._read(piece)
            with self._lock:
                self._queue.put_back(piece, error)
                if piece.transfer.done():
                    self._settled.notify_all()
                    self._work.notify_all()  # prefetches may go on, and the slot is free

    def _read(self, piece: Piece) -> BaseException | None:
        """Read one piece into its slot and give what went wrong: an error must not end the thread."""
        _, offset, nbytes, start = piece.segment
        try:
            target = self._slot_buffer(piece.transfer.slot)[start : start + nbytes]
            if len(target) != nbytes:
                raise ValueError(
                    f"slot {piece.transfer.slot} is too short for a block: bytes {start}..{start + nbytes}"
                )
            self._reader.read_into(piece.segment.file, offset, target)
        except TransferError as error:
            layer, expert = self._store.topology.ids[piece.transfer.expert]
            failure = TransferError(f"Expert {expert} of MoE layer {layer} was not read: {error}")
            failure.__cause__ = error
            return failure
        except BaseException as error:  # a bug in reader or arena: the waiter shall see it
            return error
        return None


class InlineTransfers:
    """Fill slots only when told to: a public test double without threads.

    `finish` and `fail` end a transfer; `wait_any` finishes the oldest demand of those it is given, or the oldest
    prefetch where none is a demand. With a store and slot buffers, finishing copies the expert's bytes.
    """

    def __init__(
        self, store: ExpertStore | None = None, slot_buffer: SlotBuffer | None = None, clock: Clock | None = None
    ) -> None:
        self._store, self._slot_buffer = store, slot_buffer
        self._queue = TransferQueue(clock or SystemClock(), num_readers=1, chunk_bytes=1 << 62)

    def submit(self, expert: int, slot: int, *, demand: bool) -> Transfer:
        """Queue a transfer; see TransferEngine."""
        segments = self._store.segments(expert) if self._store is not None else ()
        return self._queue.add(expert, slot, segments, demand=demand)

    @property
    def pending(self) -> list[Transfer]:
        """Transfers that are not done, demands first, each in the order of submission."""
        return [*self._queue.demands, *self._queue.prefetches]

    def finish(self, transfer: Transfer) -> None:
        """Let a transfer land; one that is done already stays as it is."""
        if not transfer.done():
            if self._store is not None and self._slot_buffer is not None:
                block = self._store[self._store.topology.ids[transfer.expert]]
                self._slot_buffer(transfer.slot)[: len(block)] = block
            self._queue.land(transfer)

    def fail(self, transfer: Transfer, error: BaseException) -> None:
        """Let a transfer fail; one that is done already stays as it is."""
        if not transfer.done():
            self._queue.land(transfer, error)

    def promote(self, transfer: Transfer) -> None:
        """Turn a prefetch into a demand; see TransferEngine."""
        self._queue.promote(transfer)

    def cancel(self, transfer: Transfer) -> bool:
        """Drop a transfer; see TransferEngine."""
        return self._queue.cancel(transfer)

    def wait_any(self, transfers: Sequence[Transfer]) -> Transfer:
        """Give one that is done, after finishing one where none is; see TransferEngine."""
        if not transfers:
            raise ValueError("wait_any needs at least one transfer, got none")
        done = [transfer for transfer in transfers if transfer.done()]
        if not done:
            done = [transfer for transfer in self.pending if transfer in transfers][:1]
            self.finish(done[0])
        return _checked(done[0])

    def stats(self) -> TransferStats:
        """Give a snapshot of the numbers so far."""
        return self._queue.stats()

    def close(self) -> None:
        """Drop all transfers; a second call does nothing."""
        self._queue.close()


def _checked(transfer: Transfer) -> Transfer:
    if transfer.demand and transfer.error is not None:
        raise transfer.error
    return transfer
