"""Tokens per expert in each batch, of encoder-decoder models: `switch-counts`, imported as a load table.

An `.npz` file per model with one array [batches, experts] per MoE layer: `moe_l1`, `moe_l3`, ... of the encoder and
`moe_l1_decode`, ... of the decoder, the number being the block, and optionally `iteration`, the batches' numbers.
A row of the source is one layer's counts in one batch. Where experts have a capacity, the tokens over it are missing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import cast

import numpy as np

from ..errors import SettingError, TraceError
from ..load_table import MOST_TOKENS, LoadHeader, LoadLayer, LoadRow
from ..topology import Stack
from .arrays import array_names, load_npz
from .config import ImportConfig
from .contract import Importer, LoadReading, file_stem, refuse
from .report import ImportReport

NAME = re.compile(r"moe_l(?P<block>[0-9]{1,9})(?P<decoder>_decode)?")
ITERATION = "iteration"


class SwitchCounts(Importer):
    """Read one file per model; each becomes a run of the load table."""

    name = "switch-counts"
    example = "an .npz file with counts moe_l1, moe_l3, ... [batches, experts]"

    def claims(self, path: Path) -> bool:
        """Say whether all arrays are counts of a layer."""
        names = array_names(path) - {ITERATION}
        return bool(names) and all(NAME.fullmatch(name) for name in names)

    def read(self, paths: Sequence[Path], config: ImportConfig, report: ImportReport) -> LoadReading:
        """Open the files; see the contract."""
        runs = {}
        for path in paths:
            arrays = load_npz(path)
            found = _layers(arrays)
            twice = next((after for before, after in pairwise(found) if before[1:] == after[1:]), None)
            if twice is not None:
                raise TraceError(
                    f"{path.name} has two arrays of {twice[1]} block {twice[2]}, {twice[0]} is one of them."
                )
            if not found:
                raise TraceError(f"{path.name} has no array moe_l1, moe_l3, ...; give a file with counts per layer.")
            layers = []
            for name, stack, block in found:
                _check(path, name, arrays[name], config)
                layers.append(
                    LoadLayer(stack=stack, block=block, num_experts=arrays[name].shape[1], top_k=config.top_k)
                )
            runs[file_stem(path)] = tuple(layers)
        if config.blocks is not None:
            raise SettingError("blocks cannot be given for switch-counts, whose arrays name them; leave it out.")
        report.note("The source counts tokens per expert, so the result is a load table: it holds no sequences.")
        recording = {"format": self.name, "files": [path.name for path in paths]}
        header = LoadHeader(runs=runs, model=config.model, recording=recording)
        return LoadReading(header=header, rows=self._rows(paths, report))

    def _rows(self, paths: Sequence[Path], report: ImportReport) -> Iterator[LoadRow]:
        for path in paths:
            arrays = load_npz(path)
            found = _layers(arrays)
            batches = _batches(path, arrays, len(arrays[found[0][0]]))
            short = 0
            for layer, (name, stack, _) in enumerate(found):
                counts = arrays[name].astype(np.int64)
                if len(counts) != len(batches):
                    raise TraceError(f"{path.name}: {name} has {len(counts)} batches, others {len(batches)}.")
                totals = counts.sum(axis=1)
                short += int((totals < totals.max()).sum())
                report.read(len(counts))
                for batch, row in zip(batches, counts, strict=True):
                    yield LoadRow(run=file_stem(path), stack=stack, layer=layer, batch=batch, counts=row)
            if short:
                report.note(
                    f"{path.name}: in {short} of {len(found) * len(batches)} rows the counts sum to less than the most "
                    "of their layer: tokens over an expert's capacity, or a shorter batch, are not counted."
                )


def _layers(arrays: dict[str, np.ndarray]) -> list[tuple[str, Stack, int]]:
    """List (array, stack, block) in the order of layers: encoder before decoder."""
    found = []
    for name in arrays:
        match = NAME.fullmatch(name)
        if match:
            found.append((name, "decoder" if match["decoder"] else "encoder", int(match["block"])))
    return cast("list[tuple[str, Stack, int]]", sorted(found, key=lambda item: (item[1] == "decoder", item[2])))


def _batches(path: Path, arrays: dict[str, np.ndarray], count: int) -> list[int]:
    numbers = arrays.get(ITERATION)
    if numbers is None:
        return list(range(count))
    if numbers.shape != (count,) or numbers.dtype.kind not in "iu" or len(np.unique(numbers)) != count:
        raise TraceError(
            f"{path.name}: {ITERATION} must be {count} different integers, got {numbers.dtype} {numbers.shape}."
        )
    if numbers.max() >= 2**63:
        raise TraceError(f"{path.name}: {ITERATION} runs to {numbers.max()}, legal is less than 2^63.")
    return numbers.tolist()


def _check(path: Path, name: str, counts: np.ndarray, config: ImportConfig) -> None:
    if counts.ndim != 2 or counts.dtype.kind not in "iu" or not counts.size:
        raise TraceError(f"{path.name}: {name} must be integers [batches, experts], got {counts.dtype} {counts.shape}.")
    if config.experts not in (None, counts.shape[1]):
        raise TraceError(f"{path.name}: {name} has {counts.shape[1]} experts, --experts says {config.experts}.")
    if counts.min() < 0:
        batch, expert = np.argwhere(counts < 0)[0].tolist()
        raise refuse(path, f"{name}, row {batch}", f"expert {expert} has the count {counts[batch, expert]}")
    if counts.max() > MOST_TOKENS:
        batch, expert = np.argwhere(counts > MOST_TOKENS)[0].tolist()
        reason = f"expert {expert} has the count {counts[batch, expert]}, legal is 0..{MOST_TOKENS}"
        raise refuse(path, f"{name}, row {batch}", reason)
    if not counts.any():
        raise TraceError(f"{path.name}: all counts of {name} are 0, the recording of a router that never ran.")
