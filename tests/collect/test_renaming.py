"""Merging sources whose ids coincide: prefixes, groups, and which sentence names the way out."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from foregate.cli.main import main
from foregate.collect.checks import check_trace
from foregate.collect.errors import SettingError, TraceError
from foregate.collect.merge import merge
from foregate.collect.notes import Note
from foregate.collect.sequence import PART_TOKENS
from foregate.collect.trace import Trace
from foregate.collect.writer import TraceWriter

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path, header: Any, make_row: Any) -> Write:
    """Give a writer of traces: write(place, {id: group}, **header fields)."""

    def written(place: str, rows: dict[str, str | None], **fields: Any) -> Path:
        with TraceWriter(tmp_path / place, replace(header, **fields)) as writer:
            for name, group in rows.items():
                writer.write(make_row(name, group=group))
        return tmp_path / place

    return written


def ids(path: Path) -> dict[str, str | None]:
    assert list(check_trace(path)) == []
    return {row.sequence: row.group for row in Trace.open(path)}


def test_the_refusal_names_the_way_out(tmp_path: Path, write: Write) -> None:
    sources = [write(name, {"my.txt:0": None}) for name in ("en", "de")]
    with pytest.raises(
        TraceError, match=r"de.shard-.*, row 0: sequence 'my.txt:0' stands in .*en too; give --rename to"
    ):
        merge(sources, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_names_of_folders_tell_ids_and_groups_apart(tmp_path: Path, write: Write) -> None:
    sources = [write(name, {"my.txt:0": "doc", "my.txt:1": None}) for name in ("en", "de")]
    assert merge(sources, tmp_path / "out", rename=True).sequences == 4
    assert ids(tmp_path / "out") == {
        "en/my.txt:0": "en/doc",
        "en/my.txt:1": None,
        "de/my.txt:0": "de/doc",
        "de/my.txt:1": None,
    }
    made = Trace.open(tmp_path / "out").header.recording["merged"]
    assert [(item["trace"], item["prefix"]) for item in made] == [("en", "en/"), ("de", "de/")]


def test_groups_that_mean_the_same_document_stay_equal(tmp_path: Path, write: Write) -> None:
    sources = [write(name, {"my.txt:0": "doc", "my.txt:1": None}) for name in ("cold", "hot")]
    merge(sources, tmp_path / "out", rename=True, keep_groups=True)
    assert ids(tmp_path / "out") == {
        "cold/my.txt:0": "doc",
        "cold/my.txt:1": "my.txt:1",  # else the same document could be trained on and measured
        "hot/my.txt:0": "doc",
        "hot/my.txt:1": "my.txt:1",
    }


def test_numbers_stand_where_two_folders_have_one_name(tmp_path: Path, write: Write) -> None:
    sources = [write(name, {"a": None}) for name in ("x/trace", "other", "y/trace")]
    merge(sources, tmp_path / "out", rename=True)
    assert list(ids(tmp_path / "out")) == ["1/a", "2/a", "3/a"]


def test_a_prefix_is_the_name_of_the_folder_however_it_is_given(
    tmp_path: Path, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    write("en", {"a": None}), write("de", {"a": None})
    monkeypatch.chdir(tmp_path / "en")
    merge([".", "../de/"], tmp_path / "out", rename=True)
    assert list(ids(tmp_path / "out")) == ["en/a", "de/a"]


def test_files_of_one_name_in_two_folders(tmp_path: Path) -> None:
    experts = np.argsort(np.random.default_rng(0).random((5, 2, 8)))[..., :3].astype(np.uint8)
    for name in "ab":
        (tmp_path / name).mkdir()
        np.savez(tmp_path / name / "t.npz", experts=experts[:: 1 if name == "a" else -1], offsets=np.array([0, 2, 5]))
    merge([tmp_path / "a" / "t.npz", tmp_path / "b" / "t.npz"], tmp_path / "out", rename=True)
    assert list(ids(tmp_path / "out")) == ["1/t.npz:0", "1/t.npz:1", "2/t.npz:0", "2/t.npz:1"]


def test_parts_of_a_long_sequence_get_one_name(tmp_path: Path, header: Any, make_row: Any) -> None:
    for name in "ab":
        with TraceWriter(tmp_path / name, header) as writer:
            writer.write(make_row("s", PART_TOKENS + 3))
    merge([tmp_path / "a", tmp_path / "b"], tmp_path / "out", rename=True)
    assert [row.num_tokens for row in Trace.open(tmp_path / "out").sequences()] == [PART_TOKENS + 3] * 2


def test_a_source_given_twice_and_groups_kept_of_nothing(tmp_path: Path, write: Write) -> None:
    source = write("a", {"a": None})
    (tmp_path / "link").symlink_to(source)
    for other in (source, tmp_path / "link"):
        with pytest.raises(SettingError, match="is given twice; give each trace once"):
            merge([source, other], tmp_path / "out", rename=True)
    with pytest.raises(SettingError, match="keep-groups says what --rename leaves"):
        merge([source], tmp_path / "out", keep_groups=True)
    assert not (tmp_path / "out").exists()


def test_the_command_renames(tmp_path: Path, write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    sources = [str(write(name, {"a": "g"})) for name in ("en", "de")]
    assert main(["merge", *sources, "--out", str(tmp_path / "no")]) == 1
    assert "--rename" in capsys.readouterr().err
    assert main(["merge", *sources, "--out", str(tmp_path / "out"), "--rename", "--keep-groups", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["sequences"] == 2
    assert ids(tmp_path / "out") == {"en/a": "g", "de/a": "g"}
    assert main(["merge", *sources, "--out", str(tmp_path / "new"), "--keep-groups"]) == 2


def test_a_merged_trace_has_the_notes_of_all_sources(tmp_path: Path, write: Write) -> None:
    tokens, layers = Note("Rows are of several requests.", "tokens_apart"), Note("Runs are apart.", "layers_apart")
    shared = Note("An assumption.")
    sources = [
        write("a", {"a": None}, notes=(tokens, shared)),
        write("b", {"b": None}),
        write("c", {"c": None}, notes=(shared, layers)),
    ]
    merge(sources, tmp_path / "all")
    assert Trace.open(tmp_path / "all").header.notes == (tokens, shared, layers)
    merge([tmp_path / "all", write("d", {"d": None})], tmp_path / "more")
    assert Trace.open(tmp_path / "more").header.notes == (tokens, shared, layers)
    merge([sources[0]], tmp_path / "one")
    assert Trace.open(tmp_path / "one").header.notes == (tokens, shared)
