"""What stands at a path where something else was expected, for messages. Knows names of files, reads none.

Worked example: `foregate simulate BUNDLE` is told that the folder is a predictor bundle, not that a file is missing.
"""

from __future__ import annotations

from pathlib import Path

# what a folder holds that has this file, the most telling first: a store is a model folder too
MARKS = {
    "trace.json": "a routing trace",
    "load.json": "a load table, which has counts and no tokens",
    "foregate.json": "a packed store",
    "card.json": "a predictor bundle",
    "config.json": "a model folder",
}
SHARD = "one shard of a routing trace"
NEXT = {
    "a load table, which has counts and no tokens": "foregate assess reads it",
    "a packed store": "foregate collect --model records one from it",
    "a model folder": "foregate collect --model records one from it",
}
RECORDED = (".json", ".jsonl", ".csv", ".txt", ".pt", ".gz", ".log")  # as other tools write what they recorded


def what_is(path: str | Path) -> str | None:
    """Say what foregate knows to stand at a path; None where it is nothing known."""
    path = Path(path)
    if path.is_file():
        if path.suffix == ".parquet" and (path.parent / "trace.json").is_file():
            return f"{SHARD}, the folder {path.parent}"
        return "a training checkpoint" if path.suffix == ".ckpt" else None
    return next((said for name, said in MARKS.items() if (path / name).is_file()), None)


def why_no_trace(path: Path) -> str:
    """Say why a path is no trace, and what to give instead."""
    usual = "give a folder written by foregate collect or foregate import, or an .npz file."
    if not path.exists():
        return f"it does not exist; {usual}"
    found = what_is(path)
    if found is not None and found.startswith(SHARD):
        return f"it is {found}; give that folder."
    if found is not None:
        return f"it is {found}; {NEXT.get(found, usual).rstrip('.')}."
    if path.is_dir():
        below = [item.name for item in sorted(path.iterdir()) if (item / "trace.json").is_file()]
        more = f" but there is one in {path / below[0]}" if below else ""
        return f"it has no trace.json{more}; {usual}"
    if path.suffix in RECORDED:
        return f"it is a file of another kind; foregate import {path} --out TRACE makes one of what a tool recorded."
    return f"it is a file of another kind; {usual}"


def require_kind(path: str | Path, mark: str, usual: str) -> str | None:
    """Say why a path is not the folder that has the file `mark`, ended by the usual advice; None where it is."""
    path, wanted = Path(path), MARKS[mark]
    if (path / mark).is_file():
        return None
    if not path.exists():
        return f"{path} does not exist, where {wanted} was expected; {usual}"
    found = what_is(path)
    return None if found is None else f"{path} is {found}, where {wanted} was expected; {usual}"
