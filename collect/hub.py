"""Data sets of the Hugging Face hub through `datasets`. Knows names and rows; every failure becomes one sentence."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .corpora import Columns, Document, Row, documents_of
from .errors import DataError


def hub_documents(data: str, subset: str | None, split: str, columns: Columns) -> Iterator[Document]:
    """Iterate over the documents of a data set; label columns give their names, not their numbers.

    Raises:
        DataError: if the data set, subset, split or a column does not exist, or the hub cannot be reached.
    """
    rows = load_rows(data, subset, split)
    name = data if subset is None else f"{data}/{subset}"
    return documents_of(_named(rows), f"{name}:{split}", columns, name)


def load_rows(data: str, subset: str | None, split: str, *, hint: str = "or give a local file with --data") -> Any:
    """Load a split as a `datasets.Dataset`, from the cache or the hub.

    Raises:
        DataError: if that fails, whatever the reason, with the reason in one line.
    """
    import datasets  # slow to import, and only this file needs it

    name = data if subset is None else f"{data} ({subset})"
    bars = datasets.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    try:
        return datasets.load_dataset(data, subset, split=split)
    except ConnectionError as error:
        raise DataError(
            f"Data set {name} is not in the cache and the Hugging Face hub cannot be reached ({_line(error)}); connect "
            f"once, {hint}."
        ) from error
    except Exception as error:  # the hub's client raises dozens of types, from three libraries
        raise DataError(
            f"Data set {name}, split {split!r}, cannot be loaded ({_line(error)}); check the names given to --data, "
            f"--subset and --split, {hint}."
        ) from error
    finally:
        if bars:
            datasets.enable_progress_bars()


def _named(rows: Any) -> Iterator[Row]:
    named = {column: feature for column, feature in rows.features.items() if hasattr(feature, "int2str")}
    for row in rows:
        for column, feature in named.items():
            if isinstance(row[column], int) and row[column] >= 0:
                row[column] = feature.int2str(row[column])
        yield row


def _line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}".rstrip(".: ")
