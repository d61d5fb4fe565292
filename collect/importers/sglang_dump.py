"""Dumps of SGLang's expert distribution recorder, `expert_distribution_recorder_*.pt`: `sglang-dump`.

Modes, told by what a dump holds: `per_token` (ids per token, imported as a trace), `per_pass` and `stat` (counts,
imported as a load table). A row of the source is one token, or one layer's counts in one pass.

The files are pickles. They are read with torch's reader that knows tensors, numbers, strings, lists and dicts and
calls nothing else; a file that holds anything more is refused unread. Ids are physical: with replicas (EPLB) the
dump's own map turns them into logical ids. Requests are not named: see `sglang_passes`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import TraceError
from ..load_table import MOST_TOKENS, LoadHeader, LoadLayer, LoadRow
from ..sequence import SequenceRouting
from ..trace import MAX_EXPERTS
from .arrays import member_names
from .config import ImportConfig
from .contract import Importer, LoadReading, Reading, file_stem, refuse
from .report import DUPLICATE, ImportReport
from .sglang_passes import Pass, linked
from .survey import Survey, chosen_blocks

RECORDS, MAP, STAT = "records", "last_physical_to_logical_map", "logical_count"
IDS, COUNTS = "topk_ids_of_layer", "global_physical_count"


class SglangDump(Importer):
    """Read one dump, or those of several ranks."""

    name = "sglang-dump"
    example = "expert_distribution_recorder_*.pt"

    def claims(self, path: Path) -> bool:
        """Say whether the file is an archive that torch.save wrote."""
        return any(name.endswith("/data.pkl") for name in member_names(path))

    def read(self, paths: Sequence[Path], config: ImportConfig, report: ImportReport) -> Reading | LoadReading:
        """Open the files; see the contract."""
        first = load_tensors(paths[0])
        if RECORDS in first and any(IDS in record for record in _records(paths[0], first)):
            return self._trace(paths, config, report)
        return self._load(paths, config, report)

    def _trace(self, paths: Sequence[Path], config: ImportConfig, report: ImportReport) -> Reading:
        survey = Survey(config)
        used: np.ndarray | None = None
        widest, vocab_size, logical = 0, 0, 0
        for path in paths:
            for item in _passes(path):
                survey.limit_reached(path, item.place, item.experts, item.logical)
                now = np.asarray(np.any(item.experts >= 0, axis=(0, 2)))
                if used is not None and len(now) != len(used):
                    raise refuse(path, item.place, f"it has {len(now)} layers where {len(used)} were expected")
                used = now if used is None else used | now
                widest = max(widest, int((item.experts >= 0).sum(axis=2).max(initial=0)))
                vocab_size = max(vocab_size, int(item.token_ids.max(initial=0)) + 1)
                logical = max(logical, item.logical)
        if used is None or not used.any():
            raise TraceError(f"{paths[0].name} holds no expert ids; record while requests run.")
        if survey.largest <= 0:
            raise TraceError(f"{paths[0].name}: all its experts are 0, the recording of a router that never ran.")
        if survey.top_k not in (None, widest):
            raise TraceError(f"{paths[0].name} has top-{widest}, --top-k says {survey.top_k}; leave it out.")
        survey.top_k = widest
        if logical and config.experts is None:
            survey.known = logical  # the map's own
        if not logical:
            report.note(f"The dump has no {MAP}: its ids are taken for logical ones.")
        blocks = np.flatnonzero(used).tolist()
        header = survey.header(report, blocks, paths=paths, name=self.name, weights="none", vocab_size=vocab_size)
        return Reading(header=header, rows=self._sequences(paths, blocks, widest, report))

    def _sequences(
        self, paths: Sequence[Path], blocks: list[int], top_k: int, report: ImportReport
    ) -> Iterator[SequenceRouting]:
        seen: set[bytes] = set()
        for path in paths:
            passes = list(_passes(path))  # torch.load has them all in memory anyway, mapped from the file
            digest = hashlib.sha256()
            for item in passes:
                digest.update(item.token_ids.tobytes() + item.experts.tobytes())
            num_tokens = sum(len(item.token_ids) for item in passes)
            if digest.digest() in seen:
                report.read(num_tokens)
                report.drop(DUPLICATE, num_tokens)
                report.note(f"{path.name} holds the same tokens as another rank's dump and is left out.")
                continue
            seen.add(digest.digest())
            yield from linked(path, passes, blocks, top_k, report)

    def _load(self, paths: Sequence[Path], config: ImportConfig, report: ImportReport) -> LoadReading:
        runs, blocks_of = {}, {}
        for path in paths:
            total, experts = np.zeros(0, np.int64), 0
            for _, counts in _counts(path, config):
                sums = counts.sum(axis=1)
                total, experts = (total + sums if len(total) else sums), counts.shape[1]
            if not total.any():
                raise TraceError(f"{path.name} counts no token; record while requests run.")
            blocks = np.flatnonzero(total).tolist()
            blocks_of[path] = blocks
            runs[file_stem(path)] = tuple(
                LoadLayer(stack="causal", block=block, num_experts=experts, top_k=config.top_k)
                for block in chosen_blocks(config, blocks)
            )
        report.note("The source counts tokens per expert, so the result is a load table: it holds no sequences.")
        recording = {"format": self.name, "files": [path.name for path in paths]}
        header = LoadHeader(runs=runs, model=config.model, recording=recording)
        return LoadReading(header=header, rows=_load_rows(paths, blocks_of, config, report))


def _load_rows(
    paths: Sequence[Path], blocks_of: dict[Path, list[int]], config: ImportConfig, report: ImportReport
) -> Iterator[LoadRow]:
    for path in paths:
        for batch, counts in _counts(path, config):
            report.read(len(blocks_of[path]))
            for layer, block in enumerate(blocks_of[path]):
                yield LoadRow(run=file_stem(path), stack="causal", layer=layer, batch=batch, counts=counts[block])


def load_tensors(path: Path) -> dict[str, Any]:
    """Load a dict of tensors and plain values, without calling anything that the file names.

    Raises:
        TraceError: if the file is damaged or holds anything else.
    """
    import torch  # only dumps of torch need it

    try:
        unsafe = torch.serialization.get_unsafe_globals_in_checkpoint(str(path))  # reads names, calls nothing
        value = None if unsafe else torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # torch raises many types for damaged archives
        raise TraceError(
            f"{path.name} is no readable dump of tensors ({_first_words(error)}); record it again."
        ) from error
    if unsafe:
        raise TraceError(
            f"{path.name} names {', '.join(sorted(unsafe)[:3])}, and reading it would call that; nothing was executed: "
            "give a dump of tensors, numbers, lists and dicts alone."
        )
    if not isinstance(value, dict) or not ({RECORDS, STAT} & set(value)):
        raise TraceError(f"{path.name} is no dump of an expert distribution: it has neither {RECORDS!r} nor {STAT!r}.")
    return value


def _records(path: Path, value: dict[str, Any]) -> list[dict[str, Any]]:
    records = value[RECORDS]
    if not isinstance(records, list) or not records or not all(isinstance(item, dict) for item in records):
        raise TraceError(f"{path.name}: {RECORDS} must be a list of passes, and not empty; record while requests run.")
    return records


def _array(path: Path, place: str, name: str, value: Any, ndim: int) -> np.ndarray:
    shape = tuple(getattr(value, "shape", ()))
    wrong = refuse(path, place, f"{name} must be a tensor of integers with {ndim} dimensions")
    if len(shape) != ndim or value.is_floating_point() or value.is_complex():
        raise wrong
    try:
        stored, array = value.untyped_storage().nbytes(), value.numpy()
    except (TypeError, RuntimeError, NotImplementedError) as error:  # sparse, quantized, without data
        raise wrong from error
    if array.dtype.kind not in "iu":
        raise wrong
    if array.nbytes > stored:  # one number, expanded to a billion
        raise refuse(path, place, f"{name} claims {array.nbytes} bytes and has {stored}")
    return array


def _map(path: Path, value: dict[str, Any]) -> np.ndarray | None:
    """Give the map [layers, physical experts] to logical ids, None where the dump has none."""
    found = value.get(MAP)
    if found is None:
        return None
    table = _array(path, MAP, MAP, found, 2)
    if not table.size or table.min() < 0:
        raise refuse(path, MAP, "it has ids below 0")
    if table.max() >= MAX_EXPERTS:
        raise refuse(path, MAP, f"it leads to expert {table.max()}, legal is 0..{MAX_EXPERTS - 1}")
    return table


def _passes(path: Path) -> Iterator[Pass]:
    """Iterate over passes with logical ids."""
    value = load_tensors(path)
    table = _map(path, value)
    for index, record in enumerate(_records(path, value)):
        place = f"pass {record.get('forward_pass_id', index)}"
        if IDS not in record:
            raise refuse(path, place, f"it has no {IDS}, others have: mixed recording modes")
        ids = _array(path, place, IDS, record[IDS], 3)
        if table is not None:
            if len(table) != len(ids) or ids.max(initial=-1) >= table.shape[1]:
                found = f"{len(ids)} layers and ids up to {ids.max(initial=-1)}"
                raise refuse(path, place, f"it has {found}, the map is for {table.shape[0]} layers of {table.shape[1]}")
            ids = np.where(ids >= 0, table[np.arange(len(ids))[:, None, None], np.maximum(ids, 0)], -1)
        logical = 0 if table is None else int(table.max()) + 1
        yield Pass.of(path, place, record, ids.transpose(1, 0, 2), logical)


def _counts(path: Path, config: ImportConfig) -> Iterator[tuple[int, np.ndarray]]:
    """Iterate over (batch, counts int64 [layers, logical experts])."""
    value = load_tensors(path)
    if STAT in value:
        steps = _array(path, STAT, STAT, value[STAT], 3)
        for step, counts in enumerate(steps):
            if counts.any():
                yield step, _checked(path, f"step {step}", counts)
        return
    table = _map(path, value)
    for index, record in enumerate(_records(path, value)):
        place = f"pass {record.get('forward_pass_id', index)}"
        counts = _array(path, place, COUNTS, record.get(COUNTS), 2)
        counts = _checked(path, place, counts)
        if table is None:
            if config.experts is not None and counts.shape[1] != config.experts:
                raise refuse(path, place, f"it counts {counts.shape[1]} physical experts and the dump has no map")
            yield index, counts
            continue
        if table.shape != counts.shape:
            raise refuse(path, place, f"its counts are {counts.shape}, the map is {table.shape}")
        logical = np.zeros((len(counts), int(table.max()) + 1), np.int64)
        np.add.at(logical, (np.arange(len(counts))[:, None], table), counts)
        yield index, logical


def _checked(path: Path, place: str, counts: np.ndarray) -> np.ndarray:
    """Give counts as int64."""
    if counts.size and (counts.min() < 0 or counts.max() > MOST_TOKENS):
        raise refuse(path, place, f"its counts run from {counts.min()} to {counts.max()}, legal is 0..{MOST_TOKENS}")
    return counts.astype(np.int64)


def _first_words(error: Exception) -> str:
    return " ".join(str(error).split())[:100].rstrip(". ") or type(error).__name__
