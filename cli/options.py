"""Making a command line from a settings class: flags with dashes, bare switches, `--config NAME|FILE`, `--json`.

Knows jsonargparse and settings classes; knows no sub-command. Underscored flags (`--max_tokens`) stay legal, because
they are the keys of the YAML files.
"""

from __future__ import annotations

from argparse import ArgumentError
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

import jsonargparse

from ..collect.errors import SettingError
from ..configs import find_config
from .config_file import check_config
from .wrong_usage import wrong_value

Settings = TypeVar("Settings")


def settings_parser(prog: str, settings: type, *, kind: str | None = None, skip: set[str | int] | None = None) -> Any:
    """Build a parser: one flag per field of a frozen settings class, `--json`, and `--config` where a kind is given.

    Args:
        prog: as "foregate collect".
        settings: a dataclass whose docstring becomes the description, and its fields' docstrings the help texts.
        kind: folder of packaged configs that `--config NAME` looks into.
        skip: fields that get no flag.
    """
    jsonargparse.set_parsing_settings(docstring_parse_attribute_docstrings=True)
    parser = jsonargparse.ArgumentParser(prog=prog, description=(settings.__doc__ or "").partition("\n\n")[0])
    if kind is not None:
        add_config(parser, kind)
    parser.add_class_arguments(settings, as_group=False, skip=skip or set())
    add_json(parser)
    spell_flags(parser)
    return parser


def add_config(parser: jsonargparse.ArgumentParser, kind: str) -> None:
    """Add `--config NAME|FILE`."""

    class FindConfig(jsonargparse.ActionConfigFile):  # pyright: ignore[reportPrivateImportUsage]
        def __call__(self, parser: Any, cfg: Any, values: Any, option_string: str | None = None) -> None:
            try:
                path = find_config(kind, values)
            except ValueError as error:
                raise SettingError(f"--{error}") from error
            check_config(parser, path, str(values))
            try:
                super().__call__(parser, cfg, str(path), option_string)
            except (TypeError, ArgumentError) as error:
                said = wrong_value(parser, str(error), file=str(values)) or f"{values}: {error}; mend the file."
                raise SettingError(said) from error

    parser.add_argument("--config", action=FindConfig, help="a packaged config's name, or a YAML file")


def add_json(parser: jsonargparse.ArgumentParser) -> None:
    """Add `--json`."""
    parser.add_argument("--json", action="store_true", help="print one JSON value on standard output")


def spell_flags(parser: jsonargparse.ArgumentParser) -> None:
    """Spell flags with dashes (underscores stay legal), and let a bare boolean flag mean true."""
    for action in parser._actions:
        for flag in list(action.option_strings):
            dashed = flag[:2] + flag[2:].replace("_", "-")
            if flag.startswith("--") and dashed != flag and "." not in flag:
                action.option_strings = [dashed if item == flag else item for item in action.option_strings]
                parser._option_string_actions[dashed] = action
        if getattr(action, "_typehint", None) is bool:
            action.nargs, action.const = "?", True


def settings_from(args: Any, settings: type[Settings]) -> Settings:
    """Build the settings from parsed arguments.

    Raises:
        SettingError: as the class itself.
    """
    assert is_dataclass(settings)
    values = {item.name: args[item.name] for item in fields(settings) if item.init and item.name in args}
    return settings(**values)
