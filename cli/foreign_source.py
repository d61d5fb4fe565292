"""What is given to `foregate import` but is no other tool's recording, or several of them at once."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ..collect.errors import ForegateError, TraceError
from ..collect.mistaken import SHARD, what_is
from ..collect.wording import counted

if TYPE_CHECKING:
    from ..collect.importers.config import ImportConfig

WEIGHTS = ("*.safetensors", "*.bin")
SHOWN = 3  # folders or files that are named


def check_source(source: Path) -> None:
    """Refuse what foregate itself or another program wrote for another purpose, and a folder of folders.

    Raises:
        TraceError: with what it is and what to do with it.
    """
    found = what_is(source)
    if found == "a model folder" and not any(any(source.glob(pattern)) for pattern in WEIGHTS):
        found = None  # a recording may lie beside the config of its model
    if found is not None:
        raise TraceError(f"{source} is {found}, not another tool's recording; {_next(source, found)}.")
    if not source.is_dir() or any(item.is_file() and not item.name.startswith(".") for item in source.iterdir()):
        return
    below = sorted(item.name for item in source.iterdir() if item.is_dir() and not item.name.startswith("."))
    if below:
        named = ", ".join(below[:SHOWN]) + (" .." if len(below) > SHOWN else "")
        traces = all((source / name / "trace.json").is_file() for name in below)
        advice = (
            f"they are traces already; foregate merge {source}/* --out TRACE puts them together"
            if traces
            else f"import each by itself, as foregate import {source / below[0]} --out TRACE"
        )
        raise TraceError(f"{source} holds no files but {counted(len(below), 'folder')} ({named}); {advice}.")


def check_models(config: ImportConfig, error: TraceError) -> None:
    """Refuse a folder whose files, each of which can be read, are of several models; called where reading it failed.

    Raises:
        TraceError: with a file of each.
    """
    from ..collect.importers.contract import LoadReading, file_stem
    from ..collect.importers.report import ImportReport
    from ..collect.importing import choose, source_files

    source = Path(config.source)
    if not source.is_dir():
        return
    found: dict[tuple[str, int, int], str] = {}
    try:
        importer, paths = choose(config, source_files(source), ImportReport())
    except ForegateError:
        return
    for path in paths:
        try:
            reading = importer.read([path], config, ImportReport())
        except ForegateError:
            continue
        if isinstance(reading, LoadReading):
            return
        layers = reading.header.topology.layers
        name = reading.header.model if reading.header.model != file_stem(path) else ""  # the default says nothing
        key = (name, len(layers), max((layer.top_k for layer in layers), default=0))
        said = ", ".join(filter(None, (key[0], counted(key[1], "MoE layer"), f"top-{key[2]}")))
        found.setdefault(key, f"{path.name} ({said})")
    if len(found) > 1:
        raise TraceError(
            f"{source} holds files of several models, {', '.join(list(found.values())[:SHOWN])}; import those of each "
            "model by themselves."
        ) from error


def _next(source: Path, found: str) -> str:
    if found.startswith(SHARD):
        return "foregate reads that folder as it is"
    if found == "a routing trace":
        return f"it needs no import: foregate validate {source} checks it"
    if found.startswith("a load table"):
        return f"it needs no import: foregate assess {source} reads it"
    if found in ("a model folder", "a packed store"):
        return f"foregate collect --model {source} records one"
    return "give a file that the tool wrote"
