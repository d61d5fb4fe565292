"""Output folders that appear whole or not at all. Knows folders; knows nothing of what is in them."""

from __future__ import annotations

import contextlib
import glob
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from ..collect.errors import SettingError, StoreError

PARTIAL = ".partial-"  # followed by the writer's process id


@contextlib.contextmanager
def staged_folder(target: str | Path, needed_bytes: int = 0) -> Iterator[Path]:
    """Give an empty folder beside `target` to write into, and rename it to `target` at the end.

    After an error, Ctrl-C or SIGTERM (where it raises) nothing is left. What a killed process left is removed by the
    next one that writes to the same place.

    Raises:
        SettingError: if `target` exists already.
        StoreError: if the disk has less than `needed_bytes` free.
    """
    target = Path(target)
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise SettingError(f"{target} exists already; give a new folder or remove it.")
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
        if target.exists():
            target.rmdir()
        partial.rename(target)
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
