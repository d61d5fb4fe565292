"""Texts to record on, by the name given to `--data`. Knows names, files and columns; knows no tokens or models.

topics               the documentation topics that every Python ships (pydoc_data.topics)
glue/sst2, /mrpc, /rte   from local files where FOREGATE_DATA is set, else through `datasets`
PATH                 a text file (its paragraphs), a .jsonl file, or a .tsv or .csv file with a header line
anything else        a data set of the Hugging Face hub, by name
"""

from __future__ import annotations

import csv
import importlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import DataError

Row = Mapping[str, Any]
TABLES: dict[str, tuple[str, Any]] = {".tsv": ("\t", csv.QUOTE_NONE), ".csv": (",", csv.QUOTE_MINIMAL)}
BINARY = {".parquet", ".arrow", ".json", ".gz", ".zip", ".zst", ".npz", ".safetensors", ".pdf"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """Hold one text."""

    source: str
    """Data set, split and row: unique, and the same in every run."""
    text: str
    """The text as it stands."""
    prompt: str | None = None
    """The text-to-text form for encoder-decoder models, as 'sst2 sentence: ...'; None where it is the text itself."""
    target: str | None = None
    """What a text-to-text model should answer; None where the data has none."""
    group: str | None = None
    """What must not be split between training and test."""
    category: str | None = None
    """Domain label."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Columns:
    """Name the columns of tabular data."""

    text: str = "text"
    """Column with the text."""
    target: str | None = None
    """Column with the target text."""
    group: str | None = None
    """Column with what must not be split between training and test."""
    category: str | None = None
    """Column with the domain label."""


def open_corpus(
    data: str, *, split: str = "train", subset: str | None = None, columns: Columns | None = None
) -> Iterator[Document]:
    """Find a corpus by name and iterate over its documents, in a fixed order; empty texts are left out.

    Args:
        data: see the module's docstring.
        split: of a data set; local files and topics have none.
        subset: configuration of a hub data set.
        columns: of tabular data.

    Raises:
        DataError: if the data is missing or cannot be read; what can be known at once is raised at once.
    """
    columns = columns or Columns()
    if data == "topics":
        return _topics()
    if data.startswith("glue/"):
        from .glue import glue_documents

        return glue_documents(data.partition("/")[2], split)
    path = Path(data).expanduser()
    if path.is_file():
        return _local(path, columns)
    if (
        path.is_dir()
        or path.suffix in {".txt", ".jsonl", ".ndjson", *TABLES, *BINARY}
        or data.startswith((".", "/", "~"))
    ):
        what = "is a folder" if path.is_dir() else "does not exist"
        raise DataError(
            f"{data} {what}; give --data a text, .jsonl, .tsv or .csv file, topics, glue/sst2, glue/mrpc, glue/rte, or "
            "the name of a Hugging Face data set."
        )
    from .hub import hub_documents

    return hub_documents(data, subset, split, columns)


def documents_of(rows: Iterable[Row], source: str, columns: Columns, name: str) -> Iterator[Document]:
    """Turn rows of a table into documents.

    Args:
        rows: dictionaries by column.
        source: prefix of each document's source; the row's number follows.
        columns: which column is what.
        name: of the data, for messages.

    Raises:
        DataError: if a row lacks a named column or its text is no text.
    """
    for number, row in enumerate(rows):
        values = {}
        for use in ("text", "target", "group", "category"):
            column = getattr(columns, use)
            if column is not None and column not in row:
                raise DataError(
                    f"{name}, row {number}, has no column {column!r}; its columns are {', '.join(map(str, row))}: "
                    f"give one with --{use}-column."
                )
            values[use] = None if column is None else row[column]
        text = values["text"]
        if not isinstance(text, str):
            raise DataError(
                f"{name}, row {number}: column {columns.text!r} holds {type(text).__name__}, expected text; "
                "give another with --text-column."
            )
        rest = {use: None if value is None else str(value) for use, value in values.items() if use != "text"}
        if text.strip():
            yield Document(source=f"{source}:{number}", text=text, **rest)


def table_rows(path: Path) -> Iterator[dict[str, str]]:
    """Iterate over the rows of a .tsv (quotes are literal) or .csv file with a header line.

    Raises:
        DataError: if a row has another number of fields than the header.
    """
    delimiter, quoting = TABLES[path.suffix]
    with path.open(encoding="utf-8-sig", newline="") as lines:  # a byte-order mark is no part of the first name
        reader = csv.DictReader(lines, delimiter=delimiter, quoting=quoting)
        for number, row in enumerate(reader):
            if None in row or None in row.values():
                raise DataError(
                    f"{path}, row {number}, does not have the header's {len(reader.fieldnames or [])} fields; mend the "
                    "file."
                )
            yield row


def reading(path: Path, read: Callable[[Path], Iterable[Row]]) -> Iterator[Row]:
    """Iterate over what `read` gives, with the operating system's and the codec's errors as one sentence."""
    try:
        yield from read(path)
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path} cannot be read ({error}); give a file in UTF-8.") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}); check the path and its permissions.") from error


def _local(path: Path, columns: Columns) -> Iterator[Document]:
    if path.suffix in BINARY:
        raise DataError(f"{path} is neither text nor a table in text; give a text, .jsonl, .tsv or .csv file.")
    if path.suffix in TABLES:
        return documents_of(reading(path, table_rows), path.name, columns, str(path))
    if path.suffix in (".jsonl", ".ndjson"):
        return documents_of(reading(path, _json_rows), path.name, columns, str(path))
    return documents_of(reading(path, _paragraphs), path.name, Columns(), str(path))


def _json_rows(path: Path) -> Iterator[Row]:
    with path.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise DataError(f"{path}, line {number}, is no JSON ({error}); mend or remove the line.") from error
            if not isinstance(row, dict):
                raise DataError(f"{path}, line {number}, is no JSON object; expected one with a column of text.")
            yield row


def _paragraphs(path: Path) -> Iterator[Row]:
    """Blocks between blank lines."""
    block: list[str] = []
    with path.open(encoding="utf-8-sig") as lines:
        for line in lines:
            if line.strip():
                block.append(line.rstrip())
            elif block:
                yield {"text": "\n".join(block)}
                block = []
    if block:
        yield {"text": "\n".join(block)}


def _topics() -> Iterator[Document]:
    try:
        topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    except ImportError as error:
        raise DataError(
            "This Python was installed without pydoc_data.topics; give a text file with --data FILE instead."
        ) from error
    return (
        Document(source=f"pydoc_data.topics:{name}", text=text, group=name)
        for name, text in sorted(topics.items())
        if text.strip()
    )
