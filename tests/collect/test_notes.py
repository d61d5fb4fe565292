"""Notes: what they may be, that a header keeps them, and that a kind nobody knows is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from foregate.collect.errors import SettingError, TraceError
from foregate.collect.notes import LONGEST, MOST, SHOWN, Note, kept, note_lines, notes_from_json
from foregate.collect.trace import Trace, TraceHeader
from foregate.collect.writer import TraceWriter

APART = Note("Its rows are of several requests.", "tokens_apart")


def test_a_header_keeps_its_notes(tmp_path: Path, header: TraceHeader, make_row: Any) -> None:
    given = replace(header, notes=(APART, Note("An assumption.")))
    with TraceWriter(tmp_path / "t", given) as writer:
        writer.write(make_row("a"))
    assert Trace.open(tmp_path / "t").header == given
    assert json.loads((tmp_path / "t" / "trace.json").read_text())["notes"] == [
        {"sentence": "Its rows are of several requests.", "kind": "tokens_apart"},
        {"sentence": "An assumption.", "kind": "remark"},
    ]


def test_a_header_from_before_has_none(header: TraceHeader) -> None:
    value = header.to_json()
    del value["notes"]
    assert TraceHeader.from_json(value).notes == ()


@pytest.mark.parametrize(
    ("notes", "message"),
    [
        ("words", "notes must be a list of at most 1000 notes, got 'words'"),
        (None, "notes must be a list"),
        ([{"sentence": "s", "kind": "remark"}] * (MOST + 1), "notes must be a list of at most 1000"),
        (["words"], "a note must be an object with kind and sentence, got 'words'"),
        ([{"kind": "remark"}], "a note must be an object with kind and sentence"),
        ([{"sentence": "s", "kind": "moons_apart"}], "must be one of tokens_apart, layers_apart, remark, got 'moons_"),
        ([{"sentence": "s", "kind": ["remark"]}], "kind of a note must be one of"),
        ([{"sentence": 3, "kind": "remark"}], "must be a printable line of at most 2000 characters, got '3'"),
        ([{"sentence": " ", "kind": "remark"}], "must be a printable line"),
        ([{"sentence": "a\nb", "kind": "remark"}], "must be a printable line"),
        ([{"sentence": "a\x1b[2J", "kind": "remark"}], "must be a printable line"),
        ([{"sentence": "\ud800", "kind": "remark"}], "must be a printable line"),
        ([{"sentence": "a" * (LONGEST + 1), "kind": "remark"}], "must be a printable line"),
    ],
)
def test_notes_that_are_none_are_refused_by_the_reader(header: TraceHeader, notes: Any, message: str) -> None:
    with pytest.raises(TraceError, match=f"where.json is no usable header: .*{message}") as raised:
        TraceHeader.from_json({**header.to_json(), "notes": notes}, "where.json")
    assert "\n" not in str(raised.value)


def test_an_unknown_kind_cannot_be_made() -> None:
    with pytest.raises(SettingError, match="kind of a note must be one of"):
        Note("words", "rows_apart")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("name", ["a\nb", "a\u2028b", "\x1b[2J", "\udc80", "\x00", "b" * 3000, "a\u00a0b"])
def test_whatever_a_file_is_called_its_note_can_be_kept(name: str) -> None:
    note = Note.of(f"{name} is left out.")
    assert notes_from_json(json.loads(json.dumps([note.to_json()]))) == (note,)


def test_each_is_kept_once_and_of_many_those_that_forbid() -> None:
    assert kept([APART, Note("b"), APART, Note("b"), Note("a")]) == (APART, Note("b"), Note("a"))
    drifting = [Note(f"Problem {number} drifts.", "layers_apart") for number in range(2 * MOST)]
    found = kept([*(Note(str(number)) for number in range(50)), *drifting, APART])
    assert len(found) == MOST
    assert APART in found
    assert found[-1] == Note(f"{2 * MOST + 51 - MOST + 1} more notes were left out.")
    assert notes_from_json([note.to_json() for note in found]) == found


def test_a_terminal_gets_a_screen_with_what_forbids_first() -> None:
    lines = note_lines([*(Note(f"{number}.") for number in range(SHOWN)), APART])
    assert lines[0] == "note: Its rows are of several requests."
    assert lines[1] == "note: 0."
    assert lines[SHOWN:] == ["... and 1 more notes; --json has all."]
    assert note_lines([]) == []
