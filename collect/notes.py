"""Notes of an import: what a source cannot prove, as a kind that programs go by and a sentence for people.

Kinds are few and closed, for each may forbid something; a trace with a kind that is not among them is refused, since
whatever it forbids would be said. Worked example: a serving engine's logs of five runs, one layer each, give a trace
with one note `layers_apart` and one `tokens_apart`: what follows from one layer or token to the next is then no fact.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from .errors import SettingError

# tokens_apart: the tokens of a row ran together and need not follow one another in a text; each may be of another
# request
# layers_apart: the layers of a row need not be of one token; each may be another run's
# remark: what was assumed or left out; forbids nothing
NoteKind = Literal["tokens_apart", "layers_apart", "remark"]
LONGEST = 2000  # characters of a sentence
MOST = 1000  # notes of a trace; a source may give cause for one at every sequence
SHOWN = 8  # in a terminal, so that they stay on one screen


@dataclass(frozen=True, slots=True)
class Note:
    """Hold one note."""

    sentence: str
    """For people; one line."""
    kind: NoteKind = "remark"
    """What it forbids."""

    def __post_init__(self) -> None:
        if self.kind not in get_args(NoteKind):
            raise SettingError(f"kind of a note must be one of {', '.join(get_args(NoteKind))}, got {self.kind!r}.")
        text = self.sentence
        if not isinstance(text, str) or not text.strip() or not text.isprintable() or len(text) > LONGEST:
            raise SettingError(
                f"sentence of a note must be a printable line of at most {LONGEST} characters, got {str(text)[:80]!r}."
            )

    @classmethod
    def of(cls, sentence: str, kind: NoteKind = "remark") -> Note:
        """Make a note of a sentence that names files or ids of a source, whatever characters these hold."""
        line = " ".join(sentence.split())
        printable = "".join(letter if letter.isprintable() else "?" for letter in line)
        return cls(printable if len(printable) <= LONGEST else f"{printable[: LONGEST - 3]}...", kind)

    def to_json(self) -> dict[str, str]:
        """Give the note as plain JSON values."""
        return asdict(self)


def notes_from_json(value: Any) -> tuple[Note, ...]:
    """Read a list of what `Note.to_json` gave; equal notes are one.

    Raises:
        SettingError: if it is no such list, or a kind is unknown.
    """
    if not isinstance(value, list) or len(value) > MOST:
        raise SettingError(f"notes must be a list of at most {MOST} notes, got {str(value)[:80]!r}.")
    for item in value:
        if not isinstance(item, dict) or not {"kind", "sentence"} <= set(item):
            raise SettingError(f"a note must be an object with kind and sentence, got {str(item)[:80]!r}.")
    return kept(Note(item["sentence"], item["kind"]) for item in value)


def kept(notes: Iterable[Note]) -> tuple[Note, ...]:
    """Give each note once, in the order of its first appearance; of more than `MOST`, those that forbid first."""
    found = tuple(dict.fromkeys(notes))
    if len(found) <= MOST:
        return found
    rest = len(found) - MOST + 1
    return (*forbidding_first(found)[: MOST - 1], Note(f"{rest} more notes were left out."))


def forbidding_first(notes: Iterable[Note]) -> list[Note]:
    """Order notes: one of each kind that forbids something, then the others of these kinds, then remarks."""
    ordered = sorted(notes, key=lambda note: note.kind == "remark")
    first = {note.kind: note for note in reversed(ordered) if note.kind != "remark"}
    leading = [note for note in ordered if first.get(note.kind) is note]
    return [*leading, *(note for note in ordered if note not in leading)]


def note_lines(notes: Iterable[Note]) -> list[str]:
    """Give what a terminal shows."""
    ordered = forbidding_first(notes)
    lines = [f"note: {note.sentence}" for note in ordered[:SHOWN]]
    if len(ordered) > SHOWN:
        lines.append(f"... and {len(ordered) - SHOWN} more notes; --json has all.")
    return lines
