"""What vLLM's `--enable-return-routed-experts` gives, as users save it: `vllm-routed-experts`.

Accepted are, each alone or as a folder of its kind:
- JSON lines (or one JSON value on one line) of responses or request outputs: `routed_experts` per completion, under
  `choices` or `outputs` or at the top, and optionally `prompt_routed_experts`, `prompt_token_ids`, `token_ids`;
- `.npz` with `routed_experts` [tokens, layers, k], optionally the same others: one request a file;
- `.npy` with that array alone: one request a file.

A row of the source is one token. Layers whose ids are 0 throughout are dense blocks, which vLLM keeps a place for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from ..errors import TraceError
from ..sequence import SequenceRouting
from .arrays import NPY_MAGIC, array_names, load_npy, load_npz, magic
from .config import ImportConfig
from .contract import Importer, Reading, file_stem, refuse
from .dummies import cut_tokens
from .lines import first_object, objects
from .report import CUT_LINE, NOT_FORWARDED, ImportReport
from .survey import Survey
from .vllm_response import PROMPT_ROUTING, ROUTING, Request, request, requests_of


class VllmRoutedExperts(Importer):
    """Read saved responses; each completion becomes a sequence."""

    name = "vllm-routed-experts"
    example = "JSON lines, .npz or .npy with routed_experts [tokens, layers, k]"

    def claims(self, path: Path) -> bool:
        """Say whether a file holds routed experts in one of the three ways."""
        if magic(path).startswith(NPY_MAGIC):
            try:
                array = load_npy(path)
            except TraceError:
                return False
            return array.ndim == 3 and array.dtype.kind in "iu"
        if array_names(path):
            return ROUTING in array_names(path)
        first = first_object(path)
        completions = first.get("choices", first.get("outputs"))
        inner = completions[0] if isinstance(completions, list) and completions else {}
        return any(
            key in item for item in (first, inner) if isinstance(item, dict) for key in (ROUTING, PROMPT_ROUTING)
        )

    def read(self, paths: Sequence[Path], config: ImportConfig, report: ImportReport) -> Reading:
        """Open the files; see the contract."""
        survey = Survey(config)
        used: np.ndarray | None = None  # bool [L]: layers with any id above 0
        num_tokens, vocab_size, known = 0, 0, True
        for item in _requests(paths, None):
            survey.array_choices(item.path, item.place, item.experts)
            if used is not None and len(used) != item.experts.shape[1]:
                found = f"{item.experts.shape[1]} layers where {len(used)} were expected"
                raise refuse(item.path, item.place, f"it has {found}")
            now = np.asarray(np.any(item.experts > 0, axis=(0, 2)))
            used = now if used is None else used | now
            num_tokens += len(item.experts)
            known = known and item.token_ids is not None
            vocab_size = vocab_size if item.token_ids is None else max(vocab_size, int(item.token_ids.max()) + 1)
        if used is None:
            raise TraceError(f"{paths[0].name} holds no request; give saved responses with {ROUTING}.")
        if not used.any():
            raise TraceError(
                f"All {num_tokens} rows of {config.source} are expert 0: the capture was never bound to the routers; "
                "record again with another attention or MoE backend, or a newer vLLM."
            )
        blocks = np.flatnonzero(used).tolist()
        if not used.all():
            dense = np.flatnonzero(~used).tolist()
            report.note(f"Layers {dense} hold expert 0 throughout: they are taken for dense blocks and left out.")
        header = survey.header(
            report, blocks, paths=paths, name=self.name, weights="none", vocab_size=vocab_size if known else None
        )
        return Reading(header=header, rows=self._rows(paths, blocks, report))

    def _rows(self, paths: Sequence[Path], blocks: list[int], report: ImportReport) -> Iterator[SequenceRouting]:
        names: dict[str, int] = {}  # how often each id came, and what it was called then
        for item in _requests(paths, report):
            experts = item.experts[:, blocks]
            report.read(len(experts))
            empty = (experts == -1).all(axis=(1, 2))
            if experts.shape[2] > 1:
                empty |= (experts == 0).all(axis=(1, 2))
            report.drop(NOT_FORWARDED, int(empty.sum()))
            if item.last_unseen:
                report.note(
                    "The last generated token of a request was never fed to the model, so it is not in the trace."
                )
            name = item.name
            while name in names:
                names[item.name] += 1
                name = f"{item.name}#{names[item.name]}"
            names[name] = 1
            row = SequenceRouting(
                sequence=name,
                group=item.group,
                source=f"{item.path.name}:{item.place}",
                prompt_tokens=item.prompt_tokens,
                token_ids=item.token_ids,
                experts=experts.reshape(len(experts), -1).astype(np.int16),
            )
            yield from cut_tokens(row, ~empty)


def _requests(paths: Sequence[Path], report: ImportReport | None) -> Iterator[Request]:
    """Iterate over the requests of all files."""
    for path in paths:
        stem = file_stem(path)
        if magic(path).startswith(NPY_MAGIC):
            yield request(path, "array", stem, stem, {ROUTING: load_npy(path)})
        elif array_names(path):
            yield request(path, "arrays", stem, stem, dict(load_npz(path)))
        else:
            for number, value in objects(path):
                if value is not None:
                    yield from requests_of(path, f"line {number}", f"{stem}:{number}", value)
                elif report is not None:
                    report.read(1)
                    report.drop(CUT_LINE, 1)
