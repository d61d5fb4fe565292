"""Files and folders that appear whole or not at all. Knows temporary siblings and renaming; not what is written."""

from __future__ import annotations

import contextlib
import errno
import glob
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from .errors import SettingError, StoreError

PARTIAL = ".partial-"  # followed by the writer's process id


@contextlib.contextmanager
def staged_file(path: Path) -> Iterator[BinaryIO]:
    """Open a temporary sibling of `path` for writing and rename it to `path` at the end; remove it after an error.

    Raises:
        OSError: as the writing itself, with the path filled in, so that a full disk can be named.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())  # else a crash of the machine could leave the name without the bytes
        os.replace(temporary, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        if isinstance(error, OSError) and error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise


@contextlib.contextmanager
def staged_folder(target: str | Path, needed_bytes: int = 0) -> Iterator[Path]:
    """Give an empty folder beside `target` to write into, and rename it to `target` at the end.

    After an error, Ctrl-C or SIGTERM (where it raises) nothing is left and `target` is as it was. What a killed process
    left is removed by the next one that writes to the same place.

    Args:
        needed_bytes: what the disk must have free.

    Raises:
        SettingError: if `target` exists already and is no empty folder, also where it appeared in the meantime.
        StoreError: if the disk has less than `needed_bytes` free.
    """
    given, target = target, Path(target)
    if target.is_symlink():
        target = target.resolve()  # what it leads to is made or filled; the link itself stays
    if target.name in ("", ".."):
        raise SettingError(f"{given} cannot be replaced while it is in use; give a new folder.")
    taken = SettingError(f"{given} exists already; give a new folder or remove it.")
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise taken
    target.parent.mkdir(parents=True, exist_ok=True)
    _remove_stale(target)
    free = shutil.disk_usage(target.parent).free
    if needed_bytes > free:
        raise StoreError(
            f"{target} needs {_gib(needed_bytes)} and {target.parent} has {_gib(free)} free; "
            "free some space or name another folder."
        )
    partial = target.with_name(f".{target.name}{PARTIAL}{os.getpid()}")
    partial.mkdir()
    try:
        yield partial
        try:
            partial.rename(target)  # over an empty folder at most: another process may have been quicker
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise taken from error
            raise
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, OSError) and error.errno is not None and error.filename is None:
            error.filename = str(target)  # so that a full disk can be named
        raise


def _remove_stale(target: Path) -> None:
    prefix = f".{target.name}{PARTIAL}"
    for path in target.parent.glob(f"{glob.escape(prefix)}*"):
        pid = path.name.removeprefix(prefix)
        if pid.isdigit() and (int(pid) == os.getpid() or not _alive(int(pid))):
            shutil.rmtree(path, ignore_errors=True)


def _alive(pid: int) -> bool:
    import psutil

    return psutil.pid_exists(pid)


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.1f} MiB"
