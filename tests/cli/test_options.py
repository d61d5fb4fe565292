"""Command lines made from settings classes."""

from argparse import ArgumentError
from dataclasses import dataclass
from pathlib import Path

import pytest
from foregate.cli.options import settings_from, settings_parser
from foregate.collect.errors import SettingError


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Paint a fence.

    Not shown.
    """

    colour: str
    """What it should look like."""
    max_planks: int = 3
    """Planks at most."""
    resume: bool = False
    """Go on where the brush was left."""

    def __post_init__(self) -> None:
        if self.max_planks < 1:
            raise SettingError(f"max_planks must be at least 1, got {self.max_planks}.")


def parse(*words: str) -> Settings:
    parser = settings_parser("foregate paint", Settings, kind="collect")
    parser.exit_on_error = False
    return settings_from(parser.parse_args(list(words)), Settings)


@pytest.mark.parametrize(
    "words",
    [
        ["--colour", "red", "--max-planks", "4", "--resume"],
        ["--resume", "--colour=red", "--max_planks=4"],
        ["--colour", "red", "--max-planks=4", "--resume", "true"],
    ],
)
def test_flags_with_dashes_underscores_and_bare_switches(words: list[str]) -> None:
    assert parse(*words) == Settings(colour="red", max_planks=4, resume=True)


def test_help_comes_from_the_docstrings() -> None:
    text = settings_parser("foregate paint", Settings).format_help()
    assert "Paint a fence." in text
    assert "Not shown" not in text
    assert "--max-planks" in text
    assert "Planks at most." in text
    assert "--max_planks" not in text


def test_config_fills_in_and_flags_win(tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    path.write_text("colour: blue\nmax_planks: 7\n")
    assert parse("--config", str(path)) == Settings(colour="blue", max_planks=7)
    assert parse("--config", str(path), "--max-planks", "2").max_planks == 2


def test_unknown_config_names_what_is_legal() -> None:
    with pytest.raises(SettingError, match=r"config must be the path of a YAML file or .*got 'fence'"):
        parse("--colour", "red", "--config", "fence")


def test_unknown_flags_bad_values_and_unknown_keys_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    path.write_text("colour: blue\nbrush: 7\n")
    for words in (
        ["--colour", "red", "--brush", "7"],
        ["--colour", "red", "--max-planks", "x"],
        [],
        ["--config", path],
    ):
        with pytest.raises((ArgumentError, SettingError)):
            parse(*map(str, words))
    with pytest.raises(SettingError, match="max_planks"):
        parse("--colour", "red", "--max-planks", "0")
