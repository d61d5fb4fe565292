"""Lines of a text file, plain or gzip, read as a stream. Knows encodings and damage; knows no formats."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

from ..errors import TraceError

LONGEST_LINE = 256 * 2**20  # bytes; a response of 100,000 tokens, 60 layers and top-8 as nested lists is 200 MB
GZIP_MAGIC = b"\x1f\x8b"
BOM = "\ufeff"


class Lines:
    """Iterate over (line number from 1, text without its line end); CRLF and a byte order mark are taken away.

    Args:
        path: of the file; gzip is told by its first bytes, not by its name.
        keep_ends: leave the line ends on, for readers of quoted fields.

    Raises:
        TraceError: while iterating, if the compressed data ends early or is damaged, or the text is not UTF-8.
    """

    def __init__(self, path: Path, *, keep_ends: bool = False) -> None:
        self.path, self.keep_ends = path, keep_ends
        self.unfinished = False  # whether the line given last has no line end

    def __iter__(self) -> Iterator[tuple[int, str]]:
        number = 0
        try:
            with self.path.open("rb") as raw:
                packed = raw.read(2) == GZIP_MAGIC
                raw.seek(0)
                # a compressed line is unpacked piece by piece: never the whole file
                file = cast(BinaryIO, gzip.GzipFile(fileobj=raw)) if packed else raw
                while line := file.readline(LONGEST_LINE):
                    number += 1
                    if len(line) >= LONGEST_LINE:
                        raise self._error(number, f"it is longer than {LONGEST_LINE // 2**20} MiB, so this is no text")
                    self.unfinished = not line.endswith(b"\n")
                    yield number, self._text(line, number)
        except EOFError as error:
            raise TraceError(
                f"{self.path.name} is truncated: its gzip data ends after line {number}; unpack what is there with "
                "gzip -dc and import that, or get the whole file."
            ) from error
        except (gzip.BadGzipFile, zlib.error) as error:
            raise self._error(number + 1, f"its gzip data is damaged ({error})") from error

    def _text(self, line: bytes, number: int) -> str:
        try:
            text = line.decode("utf-8")
        except UnicodeDecodeError as error:
            raise self._error(number, f"it is not UTF-8 ({error.reason} at byte {error.start})") from error
        if number == 1:
            text = text.removeprefix(BOM)
        return text if self.keep_ends else text.rstrip("\r\n")

    def _error(self, number: int, reason: str) -> TraceError:
        return TraceError(f"{self.path.name}, line {number}: {reason}; give the file as its tool wrote it.")


def first_lines(path: Path, count: int) -> list[str]:
    """Give the first lines that are not blank, fewer where the file is short or cannot be read as text."""
    found: list[str] = []
    try:
        if path.stat().st_size == 0:
            return []
        for _, text in Lines(path):
            if text.strip():
                found.append(text)
            if len(found) == count:
                break
    except (TraceError, OSError):
        pass  # what was read before the damage is enough to tell the format, and reading will name the damage
    return found


def json_or_none(text: str) -> Any:
    """Read one JSON value, None where the text is none or an object names a key twice."""
    try:
        return json.loads(text, object_pairs_hook=_distinct)
    except (ValueError, RecursionError):
        return None


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):  # which of the two is meant, the file does not say
        raise ValueError("a key stands twice")
    return found


def first_object(path: Path) -> dict[str, Any]:
    """Give the first line as a JSON object, {} where it is none."""
    found = first_lines(path, 1)
    value = json_or_none(found[0]) if found else None
    return value if isinstance(value, dict) else {}


def objects(path: Path) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """Iterate over the JSON objects of a JSON Lines file with their line numbers; blank lines are skipped.

    None stands for a last line that was cut while it was written.

    Raises:
        TraceError: if a line is no JSON object, with its number.
    """
    lines = Lines(path)
    for number, text in lines:
        if not text.strip():
            continue
        value = json_or_none(text)
        if not isinstance(value, dict):
            if lines.unfinished and number > 1:
                yield number, None
                return
            what = "it is no JSON object, or one with a key twice"
            raise TraceError(f"{path.name}, line {number}: {what}; give the file as its tool wrote it.")
        yield number, value
