"""Every packaged YAML is read by the parser it belongs to, and a key that nothing reads is refused."""

from __future__ import annotations

import functools
from argparse import ArgumentError
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonargparse
import pytest
import yaml
from foregate.cli.main import command_module
from foregate.collect.errors import SettingError

ROOT = Path(__file__).resolve().parent.parent
CONFIGS = ROOT / "configs"
# read by no parser of ours: tests/runtime/test_hardware.py and tests/train/test_sweeps.py hold for them
APART = ("hardware", "sweeps")
FILES = sorted(path for path in CONFIGS.rglob("*.yaml") if path.parent.name not in APART)


def name_of(path: Path) -> str:
    """Give a config's test id."""
    return path.relative_to(CONFIGS).as_posix()


def parser_for(path: Path) -> jsonargparse.ArgumentParser:
    """Give the parser that a config belongs to: the command its folder is named after, or the mini recipe's."""
    return parser_of(path.relative_to(CONFIGS).parts[0])


@functools.cache  # training's takes two seconds to build
def parser_of(folder: str) -> jsonargparse.ArgumentParser:
    """Give the parser that the configs of a folder belong to."""
    if folder == "mini":
        from foregate.train.mini.recipe import recipe_parser

        parser = recipe_parser()
    else:
        parser = command_module(folder).parser()
    parser.exit_on_error = False
    return parser


def read(parser: jsonargparse.ArgumentParser, path: Path) -> Any:
    """Parse a config as `--config PATH` does; required arguments that a config leaves to the user are made up."""
    required = {action.dest for action in parser._actions if action.required}
    missing = sorted(required - set(yaml.safe_load(path.read_text(encoding="utf-8"))))
    return parser.parse_args([*(f"--{name}=x" for name in missing), "--config", str(path)])


def spoiled(value: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Give the mapping with a key too many at the top, then inside each mapping in turn."""
    yield {**value, "no_such_key": 1}
    for key, inner in value.items():
        if isinstance(inner, dict):
            for bad in spoiled(inner):
                yield {**value, key: bad}


def test_there_are_configs() -> None:
    assert FILES


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_config_is_read_by_its_parser(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.startswith("# "), "the first line says what the file is for"
    read(parser_for(path), path)


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_a_key_that_nothing_reads_is_refused(path: Path, tmp_path: Path) -> None:
    for index, value in enumerate(spoiled(yaml.safe_load(path.read_text(encoding="utf-8")))):
        bad = tmp_path / f"{index}.yaml"
        bad.write_text(yaml.safe_dump(value), encoding="utf-8")
        with pytest.raises((ArgumentError, SettingError), match="no_such_key"):
            read(parser_for(path), bad)
