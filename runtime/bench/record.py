"""What recording costs: the same batches with and without recorder and writer, in turns. Knows no command line.

The recorded arm is what `foregate collect` runs: recorder, assembly of rows, writer thread and shards on disk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...collect.errors import SettingError


@dataclass(frozen=True, kw_only=True)
class RecordBench:
    """Measure how much slower a forward is while its routing is recorded and written."""

    model: str = "foregate-mini"
    """Name of a mini model, or folder of a transformers model."""
    batch_size: int = 8
    """Sequences of a batch."""
    tokens: int = 128
    """Tokens of a sequence."""
    batches: int = 8
    """Batches of an arm in one round."""
    rounds: int = 15
    """Rounds; each runs both arms, and the first arm changes from round to round."""
    scores: bool = False
    """Record the router scores too."""

    def __post_init__(self) -> None:
        for name in ("batch_size", "tokens", "batches", "rounds"):
            if getattr(self, name) < 1:
                raise SettingError(f"{name} must be at least 1, got {getattr(self, name)}.")


def bench(settings: RecordBench) -> dict[str, Any]:
    """Run the arms in turns and give medians, spread and the overhead."""
    raise NotImplementedError


def describe(result: dict[str, Any]) -> str:
    """Say the result in lines."""
    return ""
