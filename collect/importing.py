"""`foregate import`: from a source of another tool to a trace or load table on disk. Knows no format by name.

The result appears whole or not at all, and never in place of something else. Dummies are dropped here, whatever the
format.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from .errors import SettingError, TraceError
from .importers import IMPORTERS
from .importers.config import ImportConfig
from .importers.contract import Importer, LoadReading, Reading
from .importers.dummies import without_dummies
from .importers.report import ImportReport
from .load_table import write_load_table
from .notes import kept
from .staging import staged_folder
from .trace import HEADER_NAME, TraceHeader
from .writer import TraceWriter


@dataclass(frozen=True, kw_only=True)
class ImportResult:
    """Say what was imported."""

    out: Path
    format: str
    kind: Literal["trace", "load"]
    """A trace, or a load table of counts."""
    sequences: int
    """Sequences of the trace; 0 for a load table."""
    tokens: int
    """Tokens of the trace; 0 for a load table."""
    described: str
    """Layers, experts and top-k in a few words."""
    header: dict[str, Any]
    """Header of what was written, as JSON."""
    report: ImportReport

    def to_json(self) -> dict[str, Any]:
        """Give the result as plain JSON values."""
        return {
            "trace": str(self.out),
            "format": self.format,
            "kind": self.kind,
            "sequences": self.sequences,
            "tokens": self.tokens,
            "rows_read": self.report.rows_read,
            "rows_kept": self.report.rows_kept,
            "rows_dropped": dict(sorted(self.report.rows_dropped.items())),
            "notes": [note.to_json() for note in self.report.notes],
            "topology": self.header.get("topology"),
            "runs": self.header.get("runs"),
        }


def import_source(config: ImportConfig) -> ImportResult:
    """Import a source.

    Raises:
        SettingError: if the format is unknown, the target exists, or the config contradicts the source.
        TraceError: if the source is of no known format, damaged, or contradicts itself.
    """
    report = ImportReport()
    files = source_files(Path(config.source))
    importer, paths = choose(config, files, report)
    out = Path(config.out)
    with staged_folder(out) as folder:
        try:
            reading = importer.read(paths, config, report)
            if isinstance(reading, LoadReading):
                write_load_table(folder, reading.header, reading.rows)
                header, sequences, tokens = reading.header, 0, 0
            else:
                header, sequences, tokens = _write_trace(folder, reading, config, report)
        except (TraceError, SettingError) as error:
            raise type(error)(str(error).replace(str(folder), str(out))) from error
    if isinstance(header, TraceHeader):
        described = header.topology.describe()
    else:
        described = "; ".join(f"{run}: {len(layers)} layers" for run, layers in header.runs.items())
    return ImportResult(
        out=out,
        format=importer.name,
        kind="load" if isinstance(reading, LoadReading) else "trace",
        sequences=sequences,
        tokens=tokens,
        described=described,
        header=header.to_json(),
        report=report,
    )


def source_files(source: Path) -> list[Path]:
    """List the files of a source, by name; hidden ones and sub-folders are no part of it.

    Raises:
        TraceError: if there is no such file, or the folder is empty.
    """
    if source.is_dir():
        files = sorted(item for item in source.iterdir() if item.is_file() and not item.name.startswith("."))
        if not files:
            raise TraceError(f"{source} holds no files; give a file or a folder of files of one format.")
        return files
    if not source.is_file():
        what = "is neither a file nor a folder" if source.exists() else "does not exist"
        raise TraceError(f"{source} {what}; give a file or a folder of files of one format.")
    return [source]


def choose(config: ImportConfig, files: Sequence[Path], report: ImportReport) -> tuple[Importer, list[Path]]:
    """Find the importer and the files that it reads; files that no importer claims are left out, which is noted.

    Raises:
        SettingError: if `format` names none.
        TraceError: if no importer claims a file, or several do.
    """
    if config.format:
        if config.format not in IMPORTERS:
            raise SettingError(f"format must be one of {', '.join(IMPORTERS)}, got {config.format!r}.")
        importer = IMPORTERS[config.format]
        claimed = [path for path in files if len(files) == 1 or importer.claims(path)]
        if not claimed:
            raise TraceError(f"{config.source} holds no file of {importer.name}: {importer.example}; name its format.")
        _note_others(files, claimed, report)
        return importer, claimed
    claims = {name: [path for path in files if importer.claims(path)] for name, importer in IMPORTERS.items()}
    found = {name: paths for name, paths in claims.items() if paths and IMPORTERS[name].claims_together(paths)}
    if not found:
        formats = "; ".join(f"{name}: {importer.example}" for name, importer in IMPORTERS.items())
        raise TraceError(
            f"{config.source} is of no known format or its first bytes are damaged; --format NAME says why it cannot "
            f"be read as one of {formats}."
        )
    if len(found) > 1:
        several = ", ".join(f"{paths[0].name} ({name})" for name, paths in found.items())
        raise TraceError(f"{config.source} holds files of several formats, {several}; give --format, or one file.")
    ((name, paths),) = found.items()
    _note_others(files, paths, report)
    return IMPORTERS[name], paths


def _note_others(files: Sequence[Path], chosen: Sequence[Path], report: ImportReport) -> None:
    others = [path.name for path in files if path not in chosen]
    if others:
        more = f" and {len(others) - 3} more" if len(others) > 3 else ""
        report.note(f"Left out, being of another format: {', '.join(others[:3])}{more}.")


def _write_trace(
    folder: Path, reading: Reading, config: ImportConfig, report: ImportReport
) -> tuple[TraceHeader, int, int]:
    """Write the rows and give the header and the numbers of sequences and tokens."""
    with TraceWriter(folder, reading.header) as writer:
        for row in without_dummies(reading.rows, report, reading.rows_per_token):
            writer.write(row)
    counts = writer.statistics()
    if not counts.sequences:
        dropped = ", ".join(f"{count} {reason}" for reason, count in report.rows_dropped.items())
        raise TraceError(
            f"{config.source} holds no usable row: {report.rows_read} were read, {dropped or 'none'} dropped; record "
            "again, with requests running."
        )
    header = replace(reading.header, notes=kept(report.notes))  # only now are all known: rows are read while written
    (folder / HEADER_NAME).write_text(json.dumps(header.to_json(), indent=1) + "\n", encoding="utf-8")
    return header, counts.sequences, counts.tokens
