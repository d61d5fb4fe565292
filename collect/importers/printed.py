"""Tensors that were printed into a text. Knows PyTorch's way of printing integers; knows no formats."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

from ..errors import TraceError
from .contract import refuse
from .lines import Lines

OPENING = re.compile(r"^(?P<label>[^(]{0,80}?)\s*:\s*tensor\((?P<rest>.*)$")
NUMBERS = re.compile(r"[\[\]\d,\-\s]*")

Nested = list  # of int, or of the like


def printed_tensors(path: Path) -> Iterator[tuple[int, str, Nested | None]]:
    """Iterate over (line, label, nested lists) of statements `label: tensor([[1, 2], [3, 4]], device=...)`.

    A last statement that was cut while it was written gives None. Blank lines are skipped.

    Raises:
        TraceError: if a line is no such statement, or a tensor was printed with an ellipsis.
    """
    held: list[str] = []
    label, start = "", 0
    for number, text in Lines(path):
        if not held:
            if not text.strip():
                continue
            found = OPENING.match(text)
            if found is None:
                raise refuse(path, f"line {number}", f"expected 'LABEL: tensor(...)', got {text.strip()[:40]!r}")
            label, start, text = found["label"].strip(), number, found["rest"]
        held.append(text)
        if not text.rstrip().endswith(")"):
            continue
        yield start, label, _values(path, start, "\n".join(held))
        held = []
    if held:
        yield start, label, None


def _values(path: Path, line: int, text: str) -> Nested:
    if "..." in text:
        raise TraceError(
            f"{path.name}, line {line}: the tensor was printed with '...' in place of its middle; record again with "
            "torch.set_printoptions(threshold=sys.maxsize)."
        )
    inner = text[: text.rfind("]") + 1]
    try:
        if not NUMBERS.fullmatch(inner):
            raise ValueError("not integers")
        values = json.loads(inner)
    except (ValueError, RecursionError) as error:
        raise refuse(path, f"line {line}", "the tensor is not of integers") from error
    if not isinstance(values, list):
        raise refuse(path, f"line {line}", "the tensor is empty")
    return values
