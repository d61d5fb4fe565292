"""Reading bytes of a store's files, chosen by capability. Knows files and offsets; knows nothing of experts or slots.

Threads: any thread may call `read_into` at any time. Reads are positional, so that threads share one descriptor per
file; only `seek` has a position, and a lock per file around it.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, Protocol, get_args, runtime_checkable

from ..collect.errors import SettingError, TransferError
from .blocks import ALIGNMENT

log = logging.getLogger(__name__)

ReaderKind = Literal["direct", "preadv", "seek"]


@runtime_checkable
class Reader(Protocol):
    """Fill memory from a file of the store."""

    kind: str
    """How it reads: direct, preadv or seek."""
    reason: str
    """Why this kind was chosen, for the log."""

    def read_into(self, file: int, offset: int, target: memoryview) -> None:
        """Fill `target` from `offset` of the file with that index.

        Raises:
            TransferError: if the file ends early or the system cannot read it; names file and offset.
        """
        ...

    def close(self) -> None:
        """Close the files; a second call does nothing."""
        ...


class PreadvReader:
    """Read with preadv through the page cache."""

    kind = "preadv"
    flags = getattr(os, "O_CLOEXEC", 0)

    def __init__(self, files: Sequence[Path]) -> None:
        if not hasattr(os, "preadv"):
            raise OSError("this system has no preadv")
        self.reason = "preadv is there; reads go through the page cache"
        self._files = list(files)
        self._descriptors: list[int] = []
        try:
            for path in self._files:
                self._descriptors.append(os.open(path, os.O_RDONLY | self.flags))
        except OSError:
            self.close()
            raise

    def read_into(self, file: int, offset: int, target: memoryview) -> None:
        """Fill `target`, going on after short reads."""
        done, length = 0, len(target)
        while done < length:
            try:
                count = os.preadv(self._descriptors[file], [target[done:]], offset + done)
            except (OSError, IndexError) as error:
                raise _failed(self._files[file], offset + done, error) from error
            if count == 0:
                raise _failed(self._files[file], offset + done, None)
            done += count

    def close(self) -> None:
        """Close the files; a second call does nothing."""
        descriptors, self._descriptors = self._descriptors, []
        for descriptor in descriptors:
            os.close(descriptor)


class DirectReader(PreadvReader):
    """Read with preadv and O_DIRECT: straight from the disk, without the page cache.

    Memory, offset and length must be multiples of 4096; blocks and slots are.
    """

    kind = "direct"
    flags = PreadvReader.flags | getattr(os, "O_DIRECT", 0)

    def __init__(self, files: Sequence[Path]) -> None:
        if not hasattr(os, "O_DIRECT"):
            raise OSError("this system has no O_DIRECT")
        super().__init__(files)
        self.reason = "preadv with O_DIRECT works on this file system; reads bypass the page cache"

    def read_into(self, file: int, offset: int, target: memoryview) -> None:
        """Fill `target`; misaligned requests are refused before the system sees them."""
        if offset % ALIGNMENT or len(target) % ALIGNMENT or address_of(target) % ALIGNMENT:
            raise ValueError(
                f"O_DIRECT needs multiples of {ALIGNMENT}, got offset {offset}, length {len(target)}, "
                f"memory at {address_of(target):#x}"
            )
        super().read_into(file, offset, target)


class SeekReader:
    """Read with seek and readinto, one reader per file at a time: works everywhere."""

    kind = "seek"

    def __init__(self, files: Sequence[Path]) -> None:
        self.reason = "seek and readinto work everywhere; reads of one file wait for each other"
        self._files = list(files)
        self._locks = [threading.Lock() for _ in self._files]
        self._handles: list = []
        try:
            for path in self._files:
                self._handles.append(open(path, "rb", buffering=0))  # noqa: SIM115 - closed by close()
        except OSError:
            self.close()
            raise

    def read_into(self, file: int, offset: int, target: memoryview) -> None:
        """Fill `target`, going on after short reads."""
        done, length = 0, len(target)
        with self._locks[file]:
            while done < length:
                try:
                    handle = self._handles[file]
                    handle.seek(offset + done)
                    count = handle.readinto(target[done:])
                except (OSError, IndexError, ValueError) as error:
                    raise _failed(self._files[file], offset + done, error) from error
                if not count:
                    raise _failed(self._files[file], offset + done, None)
                done += count

    def close(self) -> None:
        """Close the files; a second call does nothing."""
        handles, self._handles = self._handles, []
        for handle in handles:
            handle.close()


READERS: dict[ReaderKind, Callable[[Sequence[Path]], Reader]] = {
    "direct": DirectReader,
    "preadv": PreadvReader,
    "seek": SeekReader,
}
assert set(READERS) == set(get_args(ReaderKind))


class FailingReader:
    """Fail chosen reads, for tests: wraps a reader and raises where `fails(file, offset)` says so."""

    def __init__(self, reader: Reader, fails: Callable[[int, int], bool]) -> None:
        self.kind, self.reason = reader.kind, "injected failures"
        self._reader = reader
        self._fails = fails

    def read_into(self, file: int, offset: int, target: memoryview) -> None:
        """Raise TransferError where told, else read."""
        if self._fails(file, offset):
            raise TransferError(f"file {file} could not be read at offset {offset} (injected failure)")
        self._reader.read_into(file, offset, target)

    def close(self) -> None:
        """Close the wrapped reader."""
        self._reader.close()


def open_reader(files: Sequence[Path], kind: str = "auto") -> Reader:
    """Open the files with a kind of reader, or with the first that works; the choice is logged with its reason.

    Raises:
        SettingError: if the kind is unknown or does not work here.
    """
    if kind != "auto" and kind not in READERS:
        raise SettingError(f"reader must be auto or one of {', '.join(READERS)}, got {kind!r}.")
    refused = []
    for name in READERS:
        if kind not in ("auto", name):
            continue
        try:
            reader = READERS[name](files)
        except OSError as error:
            refused.append(f"{name}: {error}")
            continue
        try:
            _probe(reader, files)
        except TransferError as error:
            reader.close()
            refused.append(f"{name}: {error}")
            continue
        if refused:
            reader.reason += f" ({'; '.join(refused)})"
        log.info("reader %s: %s", reader.kind, reader.reason)
        return reader
    raise SettingError(f"reader {kind} does not work on {files[0] if files else 'no files'} ({'; '.join(refused)}).")


def address_of(target: memoryview) -> int:
    """Give the memory address of a writable buffer."""
    return ctypes.addressof(ctypes.c_char.from_buffer(target))


def _probe(reader: Reader, files: Sequence[Path]) -> None:
    """Read one aligned page of each file: some file systems accept O_DIRECT when opening and refuse the read."""
    with mmap.mmap(-1, ALIGNMENT) as page, memoryview(page) as target:
        for index, path in enumerate(files):
            if path.stat().st_size >= ALIGNMENT:
                reader.read_into(index, 0, target)


def _failed(path: Path, offset: int, error: Exception | None) -> TransferError:
    reason = "the file ends there" if error is None else getattr(error, "strerror", None) or str(error)
    return TransferError(f"{path} could not be read at offset {offset} ({reason}); check the disk and the store.")
