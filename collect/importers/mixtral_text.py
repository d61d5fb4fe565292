"""Text files of printed tensors, one statement for the token ids and one for the experts per layer: `mixtral-text`.

    input_ids: tensor([[    1,   733, 16289]], device='cuda')
    Layer 0 topk_ids: tensor([[5, 1],
            [5, 2],
            [6, 5]], device='cuda', dtype=torch.int32)
    input_ids: ... Layer 1 topk_ids: ...

A forward is its layers in rising order, each behind the same token ids. A forward of several tokens is a prefill and
starts a new sequence; a forward of one token goes on with it. So a prompt of a single token cannot be told from a
generated one, and counts as the going on of the sequence before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ..errors import TraceError
from ..sequence import SequenceRouting
from .config import ImportConfig
from .contract import Importer, Reading, file_stem, refuse
from .lines import first_lines
from .printed import Nested, printed_tensors
from .report import CUT_LINE, INCOMPLETE_FORWARD, ImportReport
from .survey import Survey

INPUT_IDS, LAYER, TOPK_IDS = "input_ids", "Layer ", " topk_ids"
GOES_ON = (
    "A forward of one token is taken to go on with the sequence before it: a prompt of a single token cannot be told "
    "from a generated one."
)


@dataclass(slots=True)
class Forward:
    """Hold one forward as far as it was read."""

    token_ids: list[int]
    line: int
    layers: dict[int, Nested] = field(default_factory=dict)


class MixtralText(Importer):
    """Read files of printed tensors."""

    name = "mixtral-text"
    example = "printed lines 'input_ids: tensor([[...]])' and 'Layer 0 topk_ids: tensor([[...]])'"

    def claims(self, path: Path) -> bool:
        """Say whether the text begins with printed token ids."""
        found = first_lines(path, 1)
        return bool(found) and found[0].startswith(f"{INPUT_IDS}: tensor(")

    def read(self, paths: Sequence[Path], config: ImportConfig, report: ImportReport) -> Reading:
        """Open the files; see the contract."""
        survey, layers, largest = Survey(config), set(), 0
        for path in paths:
            for forward in _forwards(path, ImportReport()):
                largest = max(largest, *forward.token_ids)
                for layer, choices in forward.layers.items():
                    layers.add(layer)
                    for ids in choices:
                        survey.choice(path, f"line {forward.line}, layer {layer}", ids)
        if not layers:
            raise TraceError(f"{paths[0].name} holds no layer's experts; give a log with routing in it.")
        header = survey.header(report, sorted(layers), paths=paths, name=self.name, vocab_size=largest + 1)
        return Reading(header=header, rows=self._rows(paths, sorted(layers), report), rows_per_token=len(layers))

    def _rows(self, paths: Sequence[Path], layers: list[int], report: ImportReport) -> Iterator[SequenceRouting]:
        for path in paths:
            number = 0
            held: list[Forward] = []
            for forward in _forwards(path, report):
                whole = list(forward.layers) == layers
                if not whole:
                    report.drop(INCOMPLETE_FORWARD, sum(map(len, forward.layers.values())))
                if held and (not whole or len(forward.token_ids) > 1):
                    yield _row(path, number, held)
                    number, held = number + 1, []
                if whole:
                    if held:
                        report.note(GOES_ON)
                    held.append(forward)
            if held:
                yield _row(path, number, held)


def _row(path: Path, number: int, forwards: list[Forward]) -> SequenceRouting:
    """Join a prefill and the forwards of one token that follow it."""
    first = len(forwards[0].token_ids)
    experts = np.concatenate([np.concatenate(list(map(np.array, f.layers.values())), axis=1) for f in forwards])
    return SequenceRouting(
        sequence=f"{file_stem(path)}:{number}",
        group=f"{file_stem(path)}:{number}",
        source=f"{path.name}:{forwards[0].line}",
        prompt_tokens=first if first > 1 else None,
        token_ids=np.array([token for forward in forwards for token in forward.token_ids], np.int32),
        experts=experts.astype(np.int16),
    )


def _forwards(path: Path, report: ImportReport) -> Iterator[Forward]:
    """Iterate over forwards, complete or not; one is held at a time."""
    forward: Forward | None = None
    tokens: list[int] | None = None  # printed last, no layer behind them yet
    for line, label, values in printed_tensors(path):
        if values is None:
            report.read(1)
            report.drop(CUT_LINE, 1)
            break
        if label == INPUT_IDS:
            tokens = _token_ids(path, line, values)
            continue
        layer = label.removeprefix(LAYER).removesuffix(TOPK_IDS)
        if (
            not (label.startswith(LAYER) and label.endswith(TOPK_IDS) and layer.isdecimal() and len(layer) < 6)
            or tokens is None
        ):
            raise refuse(path, f"line {line}", f"expected 'Layer N topk_ids' behind input_ids, got {label[:40]!r}")
        report.read(len(values))
        if len(values) != len(tokens):
            raise refuse(path, f"line {line}", f"layer {layer} has {len(values)} rows for {len(tokens)} token ids")
        if forward is None or int(layer) <= next(reversed(forward.layers)):
            if forward is not None:
                yield forward
            forward = Forward(tokens, line)
        elif tokens != forward.token_ids:
            raise refuse(path, f"line {line}", f"layer {layer} has other token ids than the layers before it")
        forward.layers[int(layer)] = values
        tokens = None
    if forward is not None:
        yield forward


def _token_ids(path: Path, line: int, values: Nested) -> list[int]:
    if len(values) != 1 or not isinstance(values[0], list) or not values[0]:
        raise refuse(path, f"line {line}", f"input_ids must be a batch of one sequence, got {len(values)}")
    ids = values[0]
    if not all(type(item) is int and 0 <= item < 2**31 for item in ids):
        raise refuse(path, f"line {line}", "input_ids are not all integers of 0 or more")
    return ids
