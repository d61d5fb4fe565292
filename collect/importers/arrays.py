"""NumPy files, opened without unpickling anything. Knows damage; knows no formats."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np

from ..errors import TraceError
from ..npz import UNREADABLE, check_archive

ZIP_MAGIC, NPY_MAGIC = b"PK\x03\x04", b"\x93NUMPY"


def magic(path: Path) -> bytes:
    """Give a file's first bytes, none where it cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(6)
    except OSError:
        return b""


def member_names(path: Path) -> list[str]:
    """List the members of a zip archive, [] where it is none."""
    if not magic(path).startswith(ZIP_MAGIC):
        return []
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.namelist()
    except UNREADABLE:
        return []


def array_names(path: Path) -> set[str]:
    """List the arrays of an `.npz` file, {} where it is none."""
    return {name.removesuffix(".npy") for name in member_names(path) if name.endswith(".npy")}


def load_npz(path: Path) -> dict[str, np.ndarray]:
    """Load all arrays; nothing is unpacked to disk, whatever the members are called.

    Raises:
        TraceError: if the file is damaged or holds an array of Python objects, which only unpickling could read.
    """
    try:
        with path.open("rb") as raw, zipfile.ZipFile(raw) as archive:  # np.load leaves open what is no archive
            check_archive(archive)
            raw.seek(0)
            with np.load(raw, allow_pickle=False) as file:
                return {name: file[name] for name in file.files}
    except UNREADABLE as error:
        raise _unreadable(path, error) from error


def load_npy(path: Path) -> np.ndarray:
    """Map one array from its file.

    Raises:
        TraceError: as `load_npz`.
    """
    try:
        return np.load(path, mmap_mode="r", allow_pickle=False)
    except UNREADABLE as error:
        raise _unreadable(path, error) from error


def check_offsets(path: Path, offsets: np.ndarray, num_tokens: int) -> list[int]:
    """Give offsets as integers.

    Raises:
        TraceError: if they do not rise from 0 to the number of tokens.
    """
    whole = offsets.ndim == 1 and len(offsets) > 1 and offsets.dtype.kind in "iu"
    values = offsets.tolist() if whole else []
    wrong = next((i for i in range(1, len(values)) if values[i] < values[i - 1]), None)
    if not whole or values[0] != 0 or values[-1] != num_tokens or wrong is not None:
        place = "" if wrong is None else f", falling at entry {wrong}"
        got = f"{offsets.dtype} {offsets.ravel()[:1].tolist()} to {offsets.ravel()[-1:].tolist()}{place}"
        raise TraceError(
            f"{path.name}: offsets must rise from 0 to the number of tokens, {num_tokens}, as integers; got {got}."
        )
    return values


def _unreadable(path: Path, error: Exception) -> TraceError:
    text = " ".join(str(error).split())
    if "pickle" in text.lower() or "Python objects" in text:
        text = "it holds an array of Python objects, which are never unpickled"
    return TraceError(f"{path.name} is no readable NumPy file ({text.rstrip('.')}); save plain arrays of numbers.")
