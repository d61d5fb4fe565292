"""One writer per trace and rank: a lock file that the operating system frees when its process ends, however it ends.

Knows files and processes; knows nothing of what is written. A lock file that a killed process left is taken over by the
next one, without anybody's help; one that is released is removed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from .errors import TraceError

log = logging.getLogger(__name__)

SUFFIX = ".lock"


class WriterLock:
    """Hold the lock of one rank in a trace folder, from its making until release().

    Raises:
        TraceError: if another writer holds it.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self.path = folder / f".rank-{rank:05d}{SUFFIX}"
        self._file: int | None = None
        while self._file is None:
            file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
            if not _lock(file, self.path):
                os.close(file)
                raise TraceError(
                    f"{folder} is being written by another process as rank {rank}; wait for its end, or give another "
                    "--out."
                )
            if _same(file, self.path):  # else its last holder removed it between our opening and locking it
                self._file = file
            else:
                os.close(file)

    def release(self) -> None:
        """Remove the lock file and free the lock; a second call does nothing."""
        file, self._file = self._file, None
        if file is None:
            return
        if sys.platform != "win32":  # there an open file cannot be removed
            self.path.unlink(missing_ok=True)
        os.close(file)
        if sys.platform == "win32":
            with contextlib.suppress(OSError):
                self.path.unlink(missing_ok=True)


def others_write(folder: Path, rank: int) -> bool:
    """Say whether a writer of another rank holds its lock in this folder."""
    return any(holder is None for _, holder in _others(folder, rank))


def abandoned(folder: Path, rank: int) -> Iterator[int]:
    """Iterate over the other ranks whose writers died, and remove their lock files.

    While a rank is given its lock is held. To be called before other ranks start: one of them that is just about to
    take its lock would be refused.
    """
    for other, holder in _others(folder, rank):
        if holder is not None:
            yield other


def _others(folder: Path, rank: int) -> Iterator[tuple[int, WriterLock | None]]:
    """Iterate over the other ranks that have a lock file: with their lock, or None where it is held elsewhere."""
    for path in sorted(folder.glob(f".rank-*{SUFFIX}")):
        other = path.name.removeprefix(".rank-").removesuffix(SUFFIX)
        if other.isdigit() and int(other) != rank:
            try:
                lock = WriterLock(folder, int(other))
            except TraceError:
                yield int(other), None
            else:
                try:
                    yield int(other), lock
                finally:
                    lock.release()


def _lock(file: int, path: Path) -> bool:
    """Try to lock an open file; a file system that knows no locks gives a warning and is trusted."""
    try:
        if sys.platform == "win32":
            import msvcrt

            msvcrt.locking(file, msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    except OSError as error:
        log.warning("%s cannot be locked (%s): see to it that one process alone writes this trace.", path, error)
    return True


def _same(file: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except FileNotFoundError:
        return False
