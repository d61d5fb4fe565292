"""JSON lines of one (problem, layer, token): `speculative-moe-jsonl`.

    {"dataset": "he", "problem_id": 0, "layer": 31, "experts": [0, 1], "gating_probs": [0.9, 0.1], "token_idx": 7}

Lines are ordered by problem, then layer, then token, so one problem is held at a time. Tokens that lack a layer are
dropped. Where `token_idx` is a counter per layer that missed calls, the layers end at different tokens; then rows of
one `token_idx` need not be of one token, which the report says.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import TraceError
from ..sequence import SequenceRouting
from .config import ImportConfig
from .contract import Importer, Reading, file_stem, refuse
from .dummies import cut_tokens
from .lines import first_object, objects
from .report import CUT_LINE, DUPLICATE, INCOMPLETE_TOKEN, ImportReport
from .survey import Survey

KEYS = {"problem_id", "layer", "token_idx", "experts"}
SPARSE = 4096  # token numbers beyond twice the tokens that cannot be missing ones

Cells = dict[tuple[int, int], tuple[list[int], Any]]  # (layer, token): ids, weights


class SpeculativeJsonl(Importer):
    """Read files of problems; each problem becomes a sequence."""

    name = "speculative-moe-jsonl"
    example = 'JSON lines {"problem_id", "layer", "token_idx", "experts", "gating_probs"}'

    def claims(self, path: Path) -> bool:
        """Say whether the first line has the keys."""
        return set(first_object(path)) >= KEYS

    def read(self, paths: Sequence[Path], config: ImportConfig, report: ImportReport) -> Reading:
        """Open the files; see the contract."""
        survey, layers = Survey(config), set()
        for path in paths:
            for number, value in objects(path):
                if value is None:
                    break
                layer, token = value.get("layer"), value.get("token_idx")
                if type(layer) is not int or type(token) is not int or min(layer, token) < 0:
                    raise refuse(path, f"line {number}", "it must have layer and token_idx of 0 or more")
                survey.choice(path, f"line {number}", value.get("experts"), value.get("gating_probs"))
                layers.add(layer)
        if not layers:
            raise TraceError(f"{paths[0].name} holds no rows; give a log with routing in it.")
        header = survey.header(report, sorted(layers), paths=paths, name=self.name)
        assert survey.top_k is not None
        rows = self._rows(paths, sorted(layers), survey.top_k, header.weights != "none", report)
        return Reading(header=header, rows=rows, rows_per_token=len(layers))

    def _rows(
        self, paths: Sequence[Path], layers: list[int], top_k: int, weighted: bool, report: ImportReport
    ) -> Iterator[SequenceRouting]:
        for path in paths:
            for problem, dataset, line, cells in _problems(path, report):
                num_tokens = 1 + max(token for _, token in cells)
                distinct = len({token for _, token in cells})
                if num_tokens > 2 * distinct + SPARSE:
                    place = f"problem {problem}"
                    raise refuse(path, place, f"its token_idx runs to {num_tokens - 1}, with {distinct} tokens")
                experts = np.full((num_tokens, len(layers), top_k), -1, np.int16)
                weights = np.zeros(experts.shape, np.float16)
                index = {layer: i for i, layer in enumerate(layers)}
                for (layer, token), (ids, values) in cells.items():
                    experts[token, index[layer]] = ids
                    if weighted:
                        weights[token, index[layer]] = values
                present = experts[:, :, 0] >= 0
                whole = np.all(present, axis=1)
                report.drop(INCOMPLETE_TOKEN, int(present[~whole].sum()))
                _note_drift(problem, present, layers, report)
                row = SequenceRouting(
                    sequence=f"{file_stem(path)}:{problem}",
                    group=str(problem),
                    category=dataset,
                    source=f"{path.name}:{line}",
                    experts=experts.reshape(num_tokens, -1),
                    weights=weights.reshape(num_tokens, -1) if weighted else None,
                )
                yield from cut_tokens(row, whole)


def _note_drift(problem: Any, present: np.ndarray, layers: list[int], report: ImportReport) -> None:
    """Say so where layers count their own tokens from 0 and end at different ones; `present` is bool [T, L]."""
    counts = present.sum(axis=0)
    counted = all(present[:n, layer].all() for layer, n in enumerate(counts))
    if counted and counts.min() < counts.max():
        report.note(
            f"Problem {problem}: the layers number their tokens without a gap but hold {counts.min()} to "
            f"{counts.max()} (layer {layers[int(counts.argmin())]} has the fewest): calls were missed at places "
            "that the log does not tell, and behind them a token_idx is not the same token in every layer.",
            kind="layers_apart",
        )


def _problems(path: Path, report: ImportReport) -> Iterator[tuple[Any, str | None, int, Cells]]:
    """Iterate over (problem, data set, first line, cells)."""
    done: set[Any] = set()
    cells: Cells = {}
    current: tuple[Any, str | None, int] | None = None
    for number, value in objects(path):
        report.read(1)
        if value is None:
            report.drop(CUT_LINE, 1)
            break
        problem, dataset = value.get("problem_id"), value.get("dataset")
        if type(problem) not in (int, str):  # true equals 1
            raise refuse(path, f"line {number}", f"its problem_id must be a number or a string, got {problem!r}")
        if current is None or problem != current[0]:
            if problem in done:
                raise refuse(path, f"line {number}", f"problem {problem} stands in two places of the file")
            if current is not None:
                yield *current, cells
            done.add(problem)
            current, cells = (problem, None if dataset in (None, "unknown") else str(dataset), number), {}
        key, cell = (value["layer"], value["token_idx"]), (value["experts"], value.get("gating_probs"))
        if key not in cells:
            cells[key] = cell
        elif cells[key] == cell:
            report.drop(DUPLICATE, 1)
        else:
            place = f"token {key[1]} of layer {key[0]}"
            raise refuse(path, f"line {number}", f"{place} stands twice, with {cells[key][0]} and with {cell[0]}")
    if current is not None:
        yield *current, cells
