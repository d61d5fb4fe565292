"""vLLM logging patches that write one JSON line per token and layer: `vllm-jsonl`.

    {"type": "meta", "model_id": "Qwen/...", "layers_logged": [0], "top_k": 4, ...}
    {"type": "route", "req_id": "r1", "token_idx": 0, "layer": 0, "topk_ids": [43, 5], "topk_weights": [0.1, 0.05]}

`token_idx` restarts at 0 at every forward (and layer), and `req_id` is the same throughout. So a forward's rows are all
that is known to belong together, and each forward becomes a sequence: a prefill's rows follow one another in a text,
but a decode forward has one row per running request. The engine's warm-up is dropped: forwards of one dummy token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import TraceError
from ..sequence import SequenceRouting
from ..trace import TraceHeader
from .config import ImportConfig
from .contract import Importer, Reading, file_stem, refuse
from .lines import first_object, objects
from .report import CUT_LINE, DUPLICATE, GAP, INCOMPLETE_FORWARD, WARM_UP, ImportReport
from .survey import Survey

WARM_UP_TOKENS = 32  # equal rows that make a whole forward: so many requests never hold the same token and routing


@dataclass(slots=True)
class Block:
    """Hold one layer's rows of one forward."""

    layer: int
    line: int
    whole: bool
    """Whether token_idx ran from 0 without a gap."""
    ids: list[list[int]] = field(default_factory=list)
    weights: list[Any] = field(default_factory=list)
    next_token: int = 0


class VllmJsonl(Importer):
    """Read one file, or several that logged the same layers."""

    name = "vllm-jsonl"
    example = 'JSON lines {"type": "route", "token_idx", "layer", "topk_ids", "topk_weights"}'

    def claims(self, path: Path) -> bool:
        """Say whether the first line is a meta or route line."""
        return first_object(path).get("type") in ("meta", "route")

    def claims_together(self, paths: Sequence[Path]) -> bool:
        """Say whether all files logged the same layers; a first line that names none is as good as any."""
        return len({str(logged_layers(path)) for path in paths}) <= 1

    def read(self, paths: Sequence[Path], config: ImportConfig, report: ImportReport) -> Reading:
        """Open the files; see the contract."""
        survey = Survey(config)
        metas = [_survey(path, survey) for path in paths]
        if survey.top_k is None or survey.largest < 0:
            raise TraceError(f"{paths[0].name} holds no route line; give a log with routing in it.")
        layers = sorted({layer for _, own in metas for layer in own})
        meta = metas[0][0]
        header = survey.header(
            report,
            layers,
            paths=paths,
            name=self.name,
            model=str(meta.get("model_id", "")),
            versions={key[:-8]: str(value) for key, value in meta.items() if key.endswith("_version")},
            seed=meta["seed"] if type(meta.get("seed")) is int else None,
        )
        report.note(
            "A sequence is one forward of the log: the rows of a prefill follow one another in a text, those of a "
            "decode forward belong to different requests (the log does not say which), so nothing may be learnt from "
            "one row to the next there.",
            kind="tokens_apart",
        )
        logged = [own for _, own in metas]
        if any(own != layers for own in logged):
            report.note(
                "The files are runs of their own and nothing in them proves that their rows are the same tokens, so "
                "they are not joined: each run's rows have -1 in the layers that it did not log, and nothing may be "
                "learnt from one layer to the next.",
                kind="layers_apart",
            )
        rows = self._rows(paths, header, layers, logged, report)
        return Reading(header=header, rows=rows, rows_per_token=max(map(len, logged)))

    def _rows(
        self,
        paths: Sequence[Path],
        header: TraceHeader,
        layers: list[int],
        logged: Sequence[list[int]],
        report: ImportReport,
    ) -> Iterator[SequenceRouting]:
        top_k = header.topology.layers[0].top_k
        place = {layer: index * top_k for index, layer in enumerate(layers)}
        for path, own in zip(paths, logged, strict=True):
            dummies: set[bytes] = set()
            for number, blocks in enumerate(_forwards(path, report)):
                num_rows = sum(len(block.ids) for block in blocks)
                num_tokens = len(blocks[0].ids)
                if not all(block.whole for block in blocks):
                    report.drop(GAP, num_rows)
                    continue
                if [block.layer for block in blocks] != own or any(len(block.ids) != num_tokens for block in blocks):
                    report.drop(INCOMPLETE_FORWARD, num_rows)
                    continue
                experts = np.full((num_tokens, len(layers) * top_k), -1, np.int16)
                weights = None if header.weights == "none" else np.zeros(experts.shape, np.float32)
                for block in blocks:
                    part = slice(place[block.layer], place[block.layer] + top_k)
                    experts[:, part] = block.ids
                    if weights is not None:
                        weights[:, part] = block.weights
                if _is_warm_up(experts, weights, dummies):
                    report.drop(WARM_UP, num_rows)
                    continue
                yield SequenceRouting(
                    sequence=f"{file_stem(path)}:{number}",
                    group=file_stem(path),  # the same requests go on from forward to forward
                    source=f"{path.name}:{blocks[0].line}",
                    experts=experts,
                    weights=None if weights is None else weights.astype(np.float16),
                )


def logged_layers(path: Path) -> list[int]:
    """Give the layers that a file's first line names: those of the meta line, else of the first row."""
    first = first_object(path)
    layers = first.get("layers_logged", [first.get("layer")])
    return layers if isinstance(layers, list) else []


def _survey(path: Path, survey: Survey) -> tuple[dict[str, Any], list[int]]:
    """Look through a file: give its meta line and the layers that it logged."""
    meta: dict[str, Any] = {}
    seen: set[int] = set()
    for number, value in objects(path):
        if value is None:
            break
        if value.get("type") == "meta":
            if meta and {**meta, "created_at": 0} != {**value, "created_at": 0}:
                raise refuse(path, f"line {number}", "a second meta line contradicts the first")
            meta, named = value, value.get("layers_logged", [])
            if not isinstance(named, list) or not all(type(layer) is int for layer in named):
                raise refuse(
                    path, f"line {number}", f"its layers_logged must be a list of numbers, got {str(named)[:40]}"
                )
            top_k = meta.get("top_k")
            if type(top_k) is int and survey.top_k not in (None, top_k):
                raise refuse(path, f"line {number}", f"its top_k is {top_k} where top-{survey.top_k} was expected")
            survey.top_k = top_k if type(top_k) is int and top_k > 0 else survey.top_k
            continue
        layer, token = value.get("layer"), value.get("token_idx")
        if value.get("type") != "route" or type(layer) is not int or type(token) is not int or min(layer, token) < 0:
            raise refuse(path, f"line {number}", "it must be a route line with layer and token_idx of 0 or more")
        survey.choice(path, f"line {number}", value.get("topk_ids"), value.get("topk_weights"))
        if layer not in seen and layer not in meta.get("layers_logged", [layer]):
            raise refuse(
                path,
                f"line {number}",
                f"it is of layer {layer}, the meta line says {meta['layers_logged']} were logged",
            )
        seen.add(layer)
    silent = sorted(set(meta.get("layers_logged", [])) - seen) if seen else []
    if silent:
        raise TraceError(
            f"{path.name}: the meta line says that layer {silent[0]} was logged, no row is of it; get the whole log or "
            "correct its meta line."
        )
    return meta, sorted(seen)


def _forwards(path: Path, report: ImportReport) -> Iterator[list[Block]]:
    """Iterate over forwards: blocks of rising layers, each with the rows of its tokens."""
    blocks: list[Block] = []
    for number, value in objects(path):
        if value is None:
            report.read(1)
            report.drop(CUT_LINE, 1)
            break
        if value.get("type") != "route":
            continue
        report.read(1)
        layer, token, ids = value["layer"], value["token_idx"], value["topk_ids"]
        block = blocks[-1] if blocks else None
        repeats = block is not None and layer == block.layer and 0 < token == block.next_token - 1
        if block is not None and repeats:
            if ids != block.ids[-1]:
                raise refuse(path, f"line {number}", f"token {token} stands twice, with {block.ids[-1]} and with {ids}")
            report.drop(DUPLICATE, 1)
            continue
        if block is None or layer != block.layer or token < block.next_token:
            if block is not None and layer <= block.layer:
                yield blocks
                blocks = []
            block = Block(layer, number, whole=token == 0)
            blocks.append(block)
        elif token > block.next_token:
            block.whole = False
        block.ids.append(ids)
        block.weights.append(value.get("topk_weights"))
        block.next_token = token + 1
    if blocks:
        yield blocks


def _is_warm_up(experts: np.ndarray, weights: np.ndarray | None, dummies: set[bytes]) -> bool:
    """Say whether a forward is one dummy token over and over, and remember that token; small forwards of it follow."""
    alike = (experts == experts[0]).all() and (weights is None or (weights == weights[0]).all())
    key = experts[0].tobytes() + (b"" if weights is None else weights[0].tobytes())
    if alike and len(experts) >= WARM_UP_TOKENS:
        dummies.add(key)
    return bool(alike) and key in dummies
