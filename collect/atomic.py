"""Files that appear whole or not at all. Knows temporary siblings and renaming; knows nothing of what is written."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
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
