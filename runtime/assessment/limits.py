"""What a trace's notes forbid to say of it, statement by statement. Knows kinds of notes; knows no numbers.

tokens_apart: nothing from one token to the next - overlap, the previous token, templates, and every replay in which a
token is a step. A sequence that is one step (prefill) takes its tokens together, in whatever order they are.
layers_apart: nothing from one layer to the next - the layer pair, and every replay, since a cache serves the layers of
a token in turn.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ...collect.notes import Note
from ..events import Reading

NOTED = "by the notes of the trace"
TOKENS = "the tokens of a sequence need not follow one another in a text"
LAYERS = "the layers of a token need not belong together"


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Hold why each kind of statement may not be made; None where it may."""

    tokens: str | None = None
    """From one token to the next."""
    layers: str | None = None
    """From one layer to the next."""
    replay: str | None = None
    """Of caches: misses, times, gains, and what signals cover of misses."""

    @classmethod
    def of(cls, notes: Iterable[Note], reading: Reading) -> Limits:
        """Give what the notes of a trace forbid where its rows are read in this way."""
        kinds = {note.kind for note in notes}
        tokens, layers = "tokens_apart" in kinds, "layers_apart" in kinds
        return cls(
            tokens=_reason(TOKENS if tokens else ""),
            layers=_reason(LAYERS if layers else ""),
            replay=_reason(TOKENS if tokens and reading != "prefill" else "", LAYERS if layers else ""),
        )

    def to_json(self) -> dict[str, Any]:
        """Give the reasons as plain values."""
        return {"tokens": self.tokens, "layers": self.layers, "replay": self.replay}


def _reason(*clauses: str) -> str | None:
    told = " and ".join(clause for clause in clauses if clause)
    return f"{NOTED}, {told}" if told else None
