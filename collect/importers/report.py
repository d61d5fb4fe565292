"""What an import read, dropped and wants to be known. Knows counts and words; knows no formats."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from ..notes import Note, NoteKind

# Reasons for dropping rows; each is explained in docs/importing.md
WARM_UP = "warm_up"  # many rows in a row that are all alike: a dummy batch of the serving engine, or stored padding
DUPLICATE = "duplicate"  # the same row again, or the same tokens from another rank
GAP = "gap"  # a forward whose token numbers skip or do not start at 0
INCOMPLETE_TOKEN = "incomplete_token"  # a token that lacks some of the MoE layers
INCOMPLETE_FORWARD = "incomplete_forward"  # a forward that lacks some of the MoE layers, or has them at other lengths
CUT_LINE = "cut_line"  # the last line of a file, unfinished
NOT_FORWARDED = "not_forwarded"  # a token that no forward saw, as the last generated one
UNLINKED = "unlinked"  # a decoded token that cannot be told to which sequence it belongs
OTHER_PASS = "other_pass"  # a pass that is neither prefill nor decode: drafts, verification
REASONS = (
    WARM_UP,
    DUPLICATE,
    GAP,
    INCOMPLETE_TOKEN,
    INCOMPLETE_FORWARD,
    CUT_LINE,
    NOT_FORWARDED,
    UNLINKED,
    OTHER_PASS,
)


@dataclass(kw_only=True)
class ImportReport:
    """Count rows as the source has them: one line of a log, one token of an array."""

    rows_read: int = 0
    """Rows that the source holds."""
    rows_dropped: Counter[str] = field(default_factory=Counter)
    """Rows that are not in the result, by reason."""
    notes: list[Note] = field(default_factory=list)
    """What was assumed, looks odd, or cannot be proven; the trace keeps them."""

    def read(self, rows: int) -> None:
        """Count rows that were read."""
        self.rows_read += rows

    def drop(self, reason: str, rows: int) -> None:
        """Count rows that were dropped; 0 leaves no trace."""
        assert reason in REASONS, reason
        if rows:
            self.rows_dropped[reason] += rows

    def note(self, sentence: str, kind: NoteKind = "remark") -> None:
        """Remember a sentence, once; `kind` says what it forbids."""
        note = Note.of(sentence, kind)
        if note not in self.notes:
            self.notes.append(note)

    @property
    def rows_kept(self) -> int:
        """Rows that are in the result."""
        return self.rows_read - self.rows_dropped.total()
