"""What every importer is: it claims files by looking into them, and reads them as rows. Knows no format.

Reading is lazy: `read` looks through the source as far as the header needs (layers, largest id, top-k), and the rows
are read once more while they are written, so that a source larger than memory can be imported.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from ..errors import TraceError
from ..load_table import LoadHeader, LoadRow
from ..sequence import SequenceRouting
from ..trace import TraceHeader
from .config import ImportConfig
from .report import ImportReport


@dataclass(frozen=True, kw_only=True)
class Reading:
    """Hold an opened source of routing per token."""

    header: TraceHeader
    rows: Iterator[SequenceRouting]
    """Lazy; the report is complete when it is exhausted."""
    rows_per_token: int = 1
    """How many rows of the source make one token of a sequence."""


@dataclass(frozen=True, kw_only=True)
class LoadReading:
    """Hold an opened source of counts per layer and batch."""

    header: LoadHeader
    rows: Iterator[LoadRow]


class Importer(ABC):
    """Read one format. Each is made once, without arguments, and holds no state between sources."""

    name: ClassVar[str]
    """As in `--format`."""
    example: ClassVar[str]
    """What a file of it looks like, in a few words, for messages."""

    @abstractmethod
    def claims(self, path: Path) -> bool:
        """Say whether a file is of this format, from its first bytes or names; never raises for a damaged file."""

    def claims_together(self, paths: Sequence[Path]) -> bool:
        """Say whether files, each of which is claimed, are this format together."""
        return True

    @abstractmethod
    def read(self, paths: Sequence[Path], config: ImportConfig, report: ImportReport) -> Reading | LoadReading:
        """Open the files.

        Raises:
            TraceError: if a file is damaged or contradicts itself or another, with file and line or row.
            SettingError: if the config contradicts the files.
        """


def file_stem(path: Path) -> str:
    """Give a file's name without the suffixes of compression and format."""
    name = path.name.removesuffix(".gz")
    return name.rpartition(".")[0] or name


def refuse(path: Path, place: str, reason: str) -> TraceError:
    """Make the error for a row that cannot be read: file, place, reason."""
    return TraceError(f"{path.name}, {place}: {reason}; mend the source or leave the file out.")
