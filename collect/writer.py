"""Writing a routing trace: a bounded queue, one writer thread, one Parquet file per shard. Knows no models or tensors.

Threads: one caller thread uses write(), close() and statistics(); the writer thread alone makes shards. A row is
checked in write(), a shard as a whole before it gets its name.
Guarantees: trace.json is there before the first shard. A shard appears under its name only when it is complete, so a
killed run loses at most its open shard and what waited for it. Rows of one write() call, and of successive calls for
one sequence, share a shard. A failure of the writer thread is raised by the next write() or by close(), once; shards
written before it stay valid. A run that ends before its first shard leaves nothing behind. One writer per rank.
Locks: the rank's lock file from before trace.json is looked at until after the last shard; the queue's own inside it.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from .checks import FileCheck, OrderCheck
from .errors import ClosedError, SettingError, TraceError
from .resume import Resumed, leave_empty, open_folder
from .row_checks import RowCheck
from .row_queue import RowQueue, num_bytes
from .sequence import SequenceRouting, split_parts, stored
from .shard import write_shard
from .trace import TraceHeader

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class WriterConfig:
    """Set how a trace is cut into shards."""

    shard_rows: int = 2048
    """Rows of a shard before it is closed."""
    shard_bytes: int = 16 * 2**20
    """Bytes of a shard's rows in memory before it is closed."""
    queue_rows: int = 64
    """Calls of write() that may wait for the writer thread; further ones block."""
    queue_bytes: int = 64 * 2**20
    """Bytes of rows that may wait for the writer thread; further calls of write() block."""
    rank: int = 0
    """Which of several processes that record into one trace this is; rank 0 opens it first, the others join it."""

    def __post_init__(self) -> None:
        names = ("shard_rows", "shard_bytes", "queue_rows", "queue_bytes")
        for name, least in (*((name, 1) for name in names), ("rank", 0)):
            if getattr(self, name) < least:
                raise SettingError(f"{name} must be at least {least}, got {getattr(self, name)}.")


class WriterStats(NamedTuple):
    """Count what was handed to a writer, and what it found in the trace that it goes on with."""

    sequences: int
    rows: int
    tokens: int
    shards: int
    resumed_sequences: int
    resumed_tokens: int


class TraceWriter:
    """Write rows into a trace folder.

        with TraceWriter(path, header) as writer:
            writer.write(row)                    # a causal sequence
            writer.write(encoder_row, decoder_row)

    Args:
        path: folder of the trace; it must not hold a trace yet, unless `resume`.
        header: of the trace.
        resume: go on with the trace that is there, if one is; its header must be the same.
        config: shard sizes, queue length, rank.
        text: write the column of texts.

    Raises:
        TraceError: if something stands at the path already, the trace to go on with has another header, or another
            process writes it as the same rank.
    """

    def __init__(
        self,
        path: str | Path,
        header: TraceHeader,
        *,
        resume: bool = False,
        config: WriterConfig | None = None,
        text: bool = False,
    ) -> None:
        self.path, self.header, self.config, self.text = Path(path), header, config or WriterConfig(), text
        self._check_row, self._check_order = RowCheck(header), OrderCheck()
        self._resumed: Resumed = open_folder(self.path, header, self.config.rank, resume=resume)
        self._sequences: set[str] = set()
        self._rows = self._tokens = self._shards = 0
        self._failure: BaseException | None = None
        self._failed = self._closed = False
        self._queue = RowQueue(self.config.queue_rows, self.config.queue_bytes)
        self._thread = threading.Thread(target=self._work, name="foregate-trace-writer", daemon=True)
        self._thread.start()

    def finished(self, sequence: str) -> bool:
        """Say whether a sequence was in the trace when the writer opened it."""
        return sequence in self._resumed.sequences

    def write(self, *rows: SequenceRouting) -> None:
        """Hand over rows, best all rows of a sequence in one call; their arrays must not change afterwards.

        Rows over PART_TOKENS tokens are cut into parts. Blocks while the queue is full.

        Raises:
            TraceError: if a row fails a check, or its sequence stands in the trace already; the rows are not written.
            ClosedError: if the writer was closed or has failed before.
            OSError: if the writer thread could not write, as on a full disk.
        """
        self._raise_failure()
        if self._closed or self._failed:
            raise ClosedError(f"The writer of {self.path} is closed; open the trace again with resume.")
        parts = [part for row in rows for part in split_parts(stored(row))]
        for part in parts:
            reasons = self._check_row(part)
            if not reasons and self.finished(part.sequence):
                reasons = ["it stands in the trace already"]
            reasons = reasons or self._check_order(part)
            if reasons:
                raise TraceError(
                    f"Sequence {part.sequence!r} ({part.stack}, part {part.part}) cannot be recorded: {reasons[0]}; "
                    "mend or leave it out."
                )
        self._sequences.update(part.sequence for part in parts)
        self._rows += len(parts)
        self._tokens += sum(part.num_tokens for part in parts)
        if parts:
            self._queue.put(parts)

    def close(self) -> None:
        """Write the open shard and join the thread; a second call does nothing.

        Raises:
            OSError: if the writer thread could not write.
            TraceError: if the rows of a shard failed their checks together.
        """
        if self._closed:
            return
        self._closed = True
        self._queue.put(None)
        self._thread.join()
        if not self._shards:
            leave_empty(self.path, self._resumed, self.config.rank)
        self._resumed.lock.release()
        if self._resumed.made_folder:
            with contextlib.suppress(OSError):  # it holds a trace
                self.path.rmdir()
        self._raise_failure()

    def statistics(self) -> WriterStats:
        """Give the counts so far."""
        return WriterStats(
            sequences=len(self._sequences),
            rows=self._rows,
            tokens=self._tokens,
            shards=self._shards,
            resumed_sequences=len(self._resumed.sequences),
            resumed_tokens=self._resumed.tokens,
        )

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            with contextlib.suppress(Exception):  # the caller's error is the one to show
                self.close()

    def _raise_failure(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _work(self) -> None:
        """Run in the writer thread: gather rows, write a shard when enough are there, drain after a failure."""
        rows: list[SequenceRouting] = []
        size = 0
        while True:
            parts = self._queue.get()
            if self._failed:
                if parts is None:
                    return
                continue
            try:
                full = len(rows) >= self.config.shard_rows or size >= self.config.shard_bytes
                apart = parts is None or parts[0].sequence != rows[-1].sequence if rows else False
                if rows and apart and (full or parts is None):
                    self._write_shard(rows)
                    rows, size = [], 0
                if parts is None:
                    return
                rows += parts
                size += sum(map(num_bytes, parts))
            except BaseException as error:
                self._failure, rows = error, []
                self._failed = True
                self._queue.fail()  # so that a blocked write() comes free
                if parts is None:
                    return

    def _write_shard(self, rows: list[SequenceRouting]) -> None:
        name = f"shard-{self.config.rank:05d}-{self._resumed.next_shard + self._shards:05d}.parquet"
        check = FileCheck(self.header.topology)
        for index, row in enumerate(rows):
            check.add(row, index)
        for _, reason in check.zeros():
            raise TraceError(f"{self.path / name} is not written: {reason}; check that the routers ran.")
        for index, reason in check.repeats():
            log.warning("%s, row %s: %s; leave it out before training.", self.path / name, index, reason)
        write_shard(
            self.path / name, rows, text=self.text, scores=bool(self.header.scores), hidden=bool(self.header.hidden)
        )
        self._shards += 1
