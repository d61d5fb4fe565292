"""Router logits, from which the ids follow by top-k: `olmoe-logits`.

An `.npz` file with `logits` floats [tokens, MoE layers, experts] and `offsets` [sequences + 1]. The ids are the k
largest, larger first, among equal logits the smaller id; the logits are recorded as scores. A row of the source is one
token. Families that choose by something else than the largest logits (groups, correction bias) must not be read so.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np

from ..errors import SettingError, TraceError
from ..sequence import SequenceRouting
from ..topology import MoeLayer, MoeTopology
from ..trace import MAX_EXPERTS, TraceHeader
from .arrays import array_names, check_offsets, load_npz
from .config import ImportConfig
from .contract import Importer, Reading, file_stem, refuse
from .report import ImportReport
from .survey import chosen_blocks

TOP_K = 8  # OLMoE's


class OlmoeLogits(Importer):
    """Read one file, or several of equal layers."""

    name = "olmoe-logits"
    example = "an .npz file with logits [tokens, layers, experts] and offsets"

    def claims(self, path: Path) -> bool:
        """Say whether the archive has the two arrays."""
        return array_names(path) >= {"logits", "offsets"}

    def read(self, paths: Sequence[Path], config: ImportConfig, report: ImportReport) -> Reading:
        """Open the files; see the contract."""
        shapes, tied, top_k = set(), 0, config.top_k or TOP_K
        for path in paths:
            logits, _ = _load(path)
            shapes.add(logits.shape[1:])
            if top_k <= logits.shape[2]:
                tied += _ties(logits, top_k)
        if len(shapes) > 1:
            raise TraceError(
                f"{config.source} holds files of different layers and experts, {sorted(shapes)}; import each."
            )
        ((num_layers, experts),) = shapes
        if experts > MAX_EXPERTS:
            raise TraceError(f"{config.source} has {experts} logits a layer, legal are {MAX_EXPERTS}; ids are int16.")
        if config.experts not in (None, experts):
            raise SettingError(f"experts must be {experts}, the number of logits, got {config.experts}.")
        if top_k > experts:
            raise SettingError(f"top_k must be at most {experts}, the number of logits, got {top_k}; give --top-k.")
        if config.top_k is None:
            report.note(f"The ids are the {TOP_K} largest logits, as OLMoE chooses; for another model give --top-k.")
        if tied:
            report.note(f"In {tied} choices the last chosen logit equals the first left out; the smaller id was taken.")
        layers = [
            MoeLayer(stack="causal", block=block, num_experts=experts, top_k=top_k)
            for block in chosen_blocks(config, range(num_layers))
        ]
        header = TraceHeader(
            topology=MoeTopology(layers=tuple(layers)),
            model=config.model or file_stem(paths[0]),
            weights="none",
            scores="selection",
            recording={"format": self.name, "files": [path.name for path in paths[:20]]},
        )
        return Reading(header=header, rows=self._rows(paths, top_k, report))

    def _rows(self, paths: Sequence[Path], top_k: int, report: ImportReport) -> Iterator[SequenceRouting]:
        for path in paths:
            logits, offsets = _load(path)
            for index, (start, stop) in enumerate(pairwise(offsets)):
                scores = logits[start:stop]
                report.read(stop - start)
                if start == stop:
                    report.note(f"{path.name}: sequence {index} is empty and left out.")
                    continue
                ids = np.argsort(-scores, axis=2, kind="stable")[:, :, :top_k]
                yield SequenceRouting(
                    sequence=f"{file_stem(path)}:{index}" if len(paths) > 1 else str(index),
                    source=f"{path.name}:{index}",
                    experts=ids.reshape(stop - start, -1).astype(np.int16),
                    scores=scores.reshape(stop - start, -1),
                )


def _load(path: Path) -> tuple[np.ndarray, list[int]]:
    arrays = load_npz(path)
    for name in ("logits", "offsets"):
        if name not in arrays:
            raise TraceError(f"{path.name} has no array {name!r}; router logits need logits and offsets.")
    logits = arrays["logits"]
    if logits.ndim != 3 or logits.dtype.kind != "f" or not logits.size:
        raise TraceError(
            f"{path.name}: logits must be floats [tokens, layers, experts], got {logits.dtype} {logits.shape}."
        )
    with np.errstate(over="ignore"):
        logits = logits.astype(np.float32)  # as they are recorded: ids, ties and scores must agree
    finite = np.isfinite(logits).all(axis=2)
    if not finite.all():
        token, layer = np.argwhere(~finite)[0].tolist()
        raise refuse(path, f"token {token}", f"its logits in layer {layer} are not all finite in float32")
    flat = (logits == logits[:, :, :1]).all(axis=2)
    if flat.any():
        token, layer = np.argwhere(flat)[0].tolist()
        reason = f"its logits in layer {layer} are all {logits[token, layer, 0]:.4g} ({int(flat.sum())} such choices)"
        raise refuse(path, f"token {token}", f"{reason}: the router never ran")
    return logits, check_offsets(path, arrays["offsets"], len(logits))


def _ties(logits: np.ndarray, top_k: int) -> int:
    """Count the choices whose last chosen and first left-out logit are equal."""
    if top_k == logits.shape[2]:
        return 0
    ordered = np.sort(logits, axis=2)
    return int((ordered[:, :, -top_k] == ordered[:, :, -top_k - 1]).sum())
