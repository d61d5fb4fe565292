"""CSV files of one (layer, batch, token), layer by layer: `moe-beyond-csv`.

    Layer ID,Batch Number,Token,Activated Expert IDs
    1,0,What,"[8, 22, 43, 46, 63, 17]"

One prompt per file and batch number. Layers are numbered by block, as DeepSeek-V2-Lite has its first MoE layer in
block 1. There is no token number: a layer's rows are its tokens in order, so every layer must list the same tokens.
The layer-major order forces one file into memory at a time.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import SettingError, TraceError
from ..sequence import SequenceRouting
from .config import ImportConfig
from .contract import Importer, Reading, file_stem, refuse
from .lines import Lines, first_lines
from .report import CUT_LINE, INCOMPLETE_TOKEN, ImportReport
from .survey import Survey

COLUMNS = ["Layer ID", "Batch Number", "Token", "Activated Expert IDs"]

Row = tuple[int, int, int, str, list[int]]  # record number, layer, batch, token, ids


class MoeBeyondCsv(Importer):
    """Read files of prompts."""

    name = "moe-beyond-csv"
    example = f"a CSV file with the columns {','.join(COLUMNS)}"

    def claims(self, path: Path) -> bool:
        """Say whether the first line names the columns."""
        return first_lines(path, 1) == [",".join(COLUMNS)]

    def read(self, paths: Sequence[Path], config: ImportConfig, report: ImportReport) -> Reading:
        """Open the files; see the contract."""
        survey, layers = Survey(config), set()
        for path in paths:
            for number, layer, _, _, ids in _records(path, ImportReport()):
                survey.choice(path, f"row {number}", ids)
                layers.add(layer)
        if not layers:
            raise TraceError(f"{paths[0].name} holds no rows; give a log with routing in it.")
        words = _Words(config.tokenizer)
        if words.tokenizer is None:
            report.note("The tokens are text, so the trace has no token ids; give --tokenizer to have them.")
        header = survey.header(report, sorted(layers), paths=paths, name=self.name, **words.header())
        return Reading(header=header, rows=self._rows(paths, sorted(layers), words, report), rows_per_token=len(layers))

    def _rows(
        self, paths: Sequence[Path], layers: list[int], words: _Words, report: ImportReport
    ) -> Iterator[SequenceRouting]:
        for path in paths:
            batches: dict[int, dict[int, list[Row]]] = {}
            for row in _records(path, report):
                batches.setdefault(row[2], {}).setdefault(row[1], []).append(row)
            for batch, by_layer in batches.items():
                columns = [by_layer.get(layer, []) for layer in layers]
                num_tokens = min(map(len, columns))
                for rows in columns:
                    report.drop(INCOMPLETE_TOKEN, len(rows) - num_tokens)
                if not num_tokens:
                    continue
                for index, cells in enumerate(zip(*(rows[:num_tokens] for rows in columns), strict=True)):
                    other = next((cell for cell in cells if cell[3] != cells[0][3]), None)
                    if other is not None:
                        here, there = f"{other[3]!r} in layer {other[1]}", f"{cells[0][3]!r} in layer {layers[0]}"
                        raise refuse(path, f"row {other[0]}", f"token {index} is {here} and {there}")
                name = f"{file_stem(path)}:{batch}"
                yield SequenceRouting(
                    sequence=name,
                    group=name,
                    source=f"{path.name}:{batch}",
                    token_ids=words.ids(path, columns[0][:num_tokens]),
                    experts=np.concatenate(
                        [np.array([row[4] for row in rows[:num_tokens]], np.int16) for rows in columns], axis=1
                    ),
                )


class _Words:
    """Turn tokens that are text into ids, where a tokenizer is given."""

    def __init__(self, name: str) -> None:
        self.tokenizer: Any = None
        if not name:
            return
        from transformers import AutoTokenizer  # only a user who names a tokenizer pays for it

        try:
            self.tokenizer = AutoTokenizer.from_pretrained(name)
        except Exception as error:  # transformers and the hub's client raise many types
            reason = " ".join(str(error).split())[:120].rstrip(".")
            raise SettingError(f"tokenizer {name!r} cannot be loaded ({reason}); give a tokenizer's folder.") from error

    def header(self) -> dict[str, Any]:
        """Give what the header says of the tokenizer."""
        if self.tokenizer is None:
            return {}
        from ..pretrained import tokenizer_fingerprint

        return {"tokenizer_fingerprint": tokenizer_fingerprint(self.tokenizer), "vocab_size": len(self.tokenizer)}

    def ids(self, path: Path, rows: list[Row]) -> np.ndarray | None:
        """Give token ids int32 [T], None without a tokenizer."""
        if self.tokenizer is None:
            return None
        vocabulary = self.tokenizer.get_vocab()
        unknown = next((row for row in rows if row[3] not in vocabulary), None)
        if unknown is not None:
            raise refuse(path, f"row {unknown[0]}", f"the tokenizer has no token {unknown[3]!r}: it is another model's")
        return np.array([vocabulary[row[3]] for row in rows], np.int32)


def _records(path: Path, report: ImportReport) -> Iterator[Row]:
    """Iterate over the records behind the header, numbered from 1."""
    lines = Lines(path, keep_ends=True)
    reader = csv.reader((text for _, text in lines), strict=True)
    number = -1
    try:
        for values in reader:
            number += 1 if values else 0
            if number == 0 or not values:
                continue
            report.read(1)
            row = _row(number, values)
            if row is not None:
                yield row
            elif lines.unfinished:
                report.drop(CUT_LINE, 1)
            else:
                raise refuse(path, f"row {number}", f"it is no layer, batch, token and list of ids: {str(values)[:60]}")
    except csv.Error as error:
        if not lines.unfinished:
            raise refuse(path, f"row {number + 1}", f"it is no CSV ({error})") from error
        report.read(1)
        report.drop(CUT_LINE, 1)


def _row(number: int, values: list[str]) -> Row | None:
    if len(values) != len(COLUMNS) or not all(item.isdecimal() and len(item) < 18 for item in values[:2]):
        return None
    try:
        ids = json.loads(values[3])
    except (ValueError, RecursionError):
        return None
    return (number, int(values[0]), int(values[1]), values[2], ids) if isinstance(ids, list) else None
