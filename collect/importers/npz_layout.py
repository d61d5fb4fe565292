"""One-file traces as a folder of shards: `npz`.

`experts` integers [tokens, MoE layers, k], `offsets` [sequences + 1], and where present `weights`, `token_ids`,
`prompt_len`, `conversation`, `category`. A row of the source is one token. The file is in memory as a whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from ..checks import FEWEST_ZEROS
from ..errors import TraceError
from ..npz import NpzTrace
from ..sequence import SequenceRouting
from .arrays import array_names, check_offsets, load_npz
from .config import ImportConfig
from .contract import Importer, Reading, file_stem
from .lines import json_or_none
from .report import NOT_FORWARDED, ImportReport
from .survey import Survey


class NpzLayout(Importer):
    """Read one file, or several of equal layers."""

    name = "npz"
    example = "an .npz file with experts [tokens, layers, k] and offsets"

    def claims(self, path: Path) -> bool:
        """Say whether the archive has the two arrays."""
        return array_names(path) >= {"experts", "offsets"}

    def read(self, paths: Sequence[Path], config: ImportConfig, report: ImportReport) -> Reading:
        """Open the files; see the contract."""
        survey, shapes = Survey(config), set()
        vocab_size: int | None = 0
        for path in paths:
            arrays = load_npz(path)
            experts = _check(path, arrays, survey)
            shapes.add(experts.shape[1:])
            weights = arrays.get("weights")
            if weights is not None and (weights.shape != experts.shape or weights.dtype.kind != "f"):
                found = f"{weights.dtype} {weights.shape}"
                raise TraceError(f"{path.name}: weights must be floats {experts.shape}, got {found}.")
            if weights is not None:
                survey.weights_array(path, weights)
            ids = arrays.get("token_ids")
            vocab_size = None if ids is None or vocab_size is None else max(vocab_size, int(ids.max()) + 1)
            del arrays
        if len(shapes) > 1:
            raise TraceError(
                f"{config.source} holds files of different layers and top-k, {sorted(shapes)}; import each."
            )
        (shape,) = shapes
        header = survey.header(
            report, range(shape[0]), paths=paths, name=self.name, vocab_size=vocab_size, model=file_stem(paths[0])
        )
        return Reading(header=header, rows=self._rows(paths, shape[1], header.weights != "none", report))

    def _rows(
        self, paths: Sequence[Path], top_k: int, weighted: bool, report: ImportReport
    ) -> Iterator[SequenceRouting]:
        for path in paths:
            prefix = f"{file_stem(path)}:" if len(paths) > 1 else ""
            names = _category_names(path, report)
            for row in NpzTrace.open(path):
                report.read(row.num_tokens)
                if not row.num_tokens:
                    report.note(f"{path.name}: sequence {row.sequence} is empty and left out.")
                    continue
                # the place of a token that no forward saw is zero; with top-1 that may be a choice
                last = int(np.flatnonzero((row.experts != 0).any(axis=1)).max(initial=-1)) + 1
                zeros = row.num_tokens - last
                if last and zeros and top_k > 1:
                    report.drop(NOT_FORWARDED, zeros)
                    row = _head(row, last)
                yield replace(
                    row,
                    sequence=f"{prefix}{row.sequence}",
                    group=None if row.group is None else f"{prefix}{row.group}",
                    category=names.get(row.category or "", row.category),
                    weights=row.weights if weighted else None,
                )


def _category_names(path: Path, report: ImportReport) -> dict[str, str]:
    """Give the names of category numbers, where a list of them lies beside the file as STEM.categories.json."""
    beside = path.with_name(f"{file_stem(path)}.categories.json")
    if not beside.is_file():
        return {}
    names = json_or_none(beside.read_text(encoding="utf-8", errors="replace"))
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        report.note(f"{beside.name} is no list of names, so categories stay numbers.")
        return {}
    report.note(f"Categories are named as in {beside.name}.")
    return {str(number): name for number, name in enumerate(names)}


def _head(row: SequenceRouting, count: int) -> SequenceRouting:
    return replace(
        row,
        experts=row.experts[:count],
        token_ids=None if row.token_ids is None else row.token_ids[:count],
        weights=None if row.weights is None else row.weights[:count],
        prompt_tokens=None if row.prompt_tokens is None else min(row.prompt_tokens, count),
    )


def _check(path: Path, arrays: dict[str, np.ndarray], survey: Survey) -> np.ndarray:
    """Give the experts, checked against the config and the offsets."""
    for name in ("experts", "offsets"):
        if name not in arrays:
            raise TraceError(f"{path.name} has no array {name!r}; the npz layout needs experts and offsets.")
    experts = arrays["experts"]
    if experts.ndim != 3 or experts.dtype.kind not in "iu" or not experts.size:
        raise TraceError(
            f"{path.name}: experts must be integers [tokens, layers, k], got {experts.dtype} {experts.shape}."
        )
    check_offsets(path, arrays["offsets"], len(experts))
    survey.array_choices(path, "experts", experts)
    if experts.max() <= 0 and (experts == 0).sum() >= FEWEST_ZEROS:
        raise TraceError(f"{path.name}: all its experts are 0, the recording of a router that never ran; record again.")
    ids = arrays.get("token_ids")
    if ids is not None and (ids.shape != experts.shape[:1] or ids.dtype.kind not in "iu"):
        raise TraceError(f"{path.name}: token_ids must be {len(experts)} integers, got {ids.dtype} {ids.shape}.")
    return experts
