"""SST-2, MRPC and RTE of the GLUE benchmark, from local files or through `datasets`. Knows their columns and labels.

Local files are those of the folder that FOREGATE_DATA names: sst2/train.tsv, sst2/dev.tsv and so on, as GLUE was
published (quotes are literal, a byte-order mark may start the file). Both ways give the same documents in one order.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .corpora import Document, Row, reading, table_rows
from .errors import DataError
from .hub import load_rows

HUB_NAME = "nyu-mll/glue"
SPLITS = {"train": "train", "validation": "dev", "dev": "dev", "test": "test"}  # split -> name of the local file


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """Say where a task's texts and label stand, locally and on the hub."""

    local_text: tuple[str, ...]
    local_label: str
    hub_text: tuple[str, ...]
    labels: tuple[str, ...]
    """Words by label id; each begins with a space, as a word inside a text does."""
    names: tuple[str, ...] = ()
    """What local files write for the label ids, where it is not the id."""


TASKS = {
    "sst2": Task(
        local_text=("sentence",), local_label="label", hub_text=("sentence",), labels=(" negative", " positive")
    ),
    "mrpc": Task(
        local_text=("#1 String", "#2 String"),
        local_label="Quality",
        hub_text=("sentence1", "sentence2"),
        labels=(" not_equivalent", " equivalent"),
    ),
    "rte": Task(
        local_text=("sentence1", "sentence2"),
        local_label="label",
        hub_text=("sentence1", "sentence2"),
        labels=(" entailment", " not_entailment"),
        names=("entailment", "not_entailment"),
    ),
}


def glue_documents(name: str, split: str) -> Iterator[Document]:
    """Iterate over the documents of one task and split.

    Raises:
        DataError: if the task or split does not exist, or neither local files nor the hub have it.
    """
    if name not in TASKS:
        raise DataError(f"glue/{name} is unknown; give one of {', '.join(f'glue/{task}' for task in TASKS)}.")
    if split not in SPLITS:
        raise DataError(f"glue/{name} has no split {split!r}; give train, validation or test.")
    folder = os.environ.get("FOREGATE_DATA")
    task = TASKS[name]
    if folder:
        return _documents(name, split, task, _local(Path(folder).expanduser(), name, split, task))
    hub_split = "validation" if split == "dev" else split
    rows = load_rows(
        HUB_NAME, name, hub_split, hint=f"or set FOREGATE_DATA to a folder with {name}/{SPLITS[split]}.tsv"
    )
    return _documents(name, split, task, ((tuple(row[c] for c in task.hub_text), row["label"]) for row in rows))


Example = tuple[tuple[str, ...], Any]


def _local(folder: Path, name: str, split: str, task: Task) -> Iterator[Example]:
    path = folder / name / f"{SPLITS[split]}.tsv"
    if not path.is_file():
        there = sorted(item.relative_to(folder).as_posix() for item in folder.glob("*/*.tsv"))
        raise DataError(
            f"{path} is missing (FOREGATE_DATA={folder} has {', '.join(there) or 'no */*.tsv'}); point FOREGATE_DATA "
            f"at a folder with {name}/{SPLITS[split]}.tsv, or unset it to fetch the data."
        )
    return _examples(path, task, reading(path, table_rows))


def _examples(path: Path, task: Task, rows: Iterable[Row]) -> Iterator[Example]:
    for number, row in enumerate(rows):
        columns = task.local_text if path.stem == "test" else (*task.local_text, task.local_label)
        missing = [column for column in columns if column not in row]
        if missing:
            raise DataError(f"{path} has no column {missing[0]!r}; its columns are {', '.join(row)}: mend the file.")
        names = task.names or tuple(str(index) for index in range(len(task.labels)))
        label = row.get(task.local_label, "")
        if label not in names and path.stem != "test":
            raise DataError(f"{path}, row {number}: label {label!r} is none of {', '.join(names)}; mend the file.")
        texts = tuple(row[column] for column in task.local_text)
        yield texts, names.index(label) if label in names and path.stem != "test" else -1


def _documents(name: str, split: str, task: Task, examples: Iterable[Example]) -> Iterator[Document]:
    split = "validation" if split == "dev" else split
    for number, (texts, label) in enumerate(examples):
        texts = tuple(text.strip() for text in texts)
        columns = ("sentence",) if len(texts) == 1 else ("sentence1", "sentence2")
        fields = " ".join(f"{column}: {text}" for column, text in zip(columns, texts, strict=True))
        yield Document(
            source=f"glue/{name}:{split}:{number}",
            text=" ".join(texts),
            prompt=f"{name} {fields}",  # the form that T5 and Switch Transformers were trained on
            target=task.labels[label] if label >= 0 else None,  # test sets have -1
            category=name,
        )
