"""Folders that appear whole or not at all: never in place of another's, and beside what a link leads to."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from foregate.collect.errors import SettingError
from foregate.collect.staging import staged_folder


def fill(target: Path, text: str) -> None:
    """Stage a folder with one file."""
    with staged_folder(target) as folder:
        (folder / "file").write_text(text, encoding="utf-8")


@pytest.mark.parametrize("before", [False, True])
def test_of_two_that_write_the_same_folder_at_once_the_first_stays(before: bool, tmp_path: Path) -> None:
    target = tmp_path / "out"
    if before:
        target.mkdir()  # empty: may be filled

    def second() -> None:
        with staged_folder(target) as folder:
            (folder / "file").write_text("second", encoding="utf-8")
            (tmp_path / "other").mkdir()
            (tmp_path / "other" / "file").write_text("first", encoding="utf-8")
            (tmp_path / "other").rename(target)  # what another process does when it is done

    with pytest.raises(SettingError, match="out exists already"):
        second()
    assert (target / "file").read_text(encoding="utf-8") == "first"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_what_a_link_leads_to_is_filled_and_the_link_stays(tmp_path: Path) -> None:
    for name, there in (("empty", True), ("absent", False)):
        if there:
            (tmp_path / name).mkdir()
        link = tmp_path / f"to-{name}"
        link.symlink_to(tmp_path / name)
        fill(link, name)
        assert link.is_symlink()
        assert (tmp_path / name / "file").read_text(encoding="utf-8") == name
        with pytest.raises(SettingError, match=f"to-{name} exists already"):
            fill(link, "again")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["absent", "empty", "to-absent", "to-empty"]


def test_the_present_folder_is_no_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for target in (".", ""):
        with pytest.raises(SettingError, match="give a new folder"):
            fill(Path(target), "x")
    assert os.listdir(tmp_path) == []
