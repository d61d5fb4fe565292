"""A YAML file of settings, checked key by key against a parser before it is read. Knows parsers, no sub-command."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..collect.errors import SettingError
from ..collect.wording import ending
from .legal import field_hint, may_be_nothing, settings_class
from .wrong_usage import action_of, imported, must_be

CLASS_KEYS = {"class_path", "init_args", "dict_kwargs"}
NO_SETTINGS = ("config", "help", "print_config", "print_shtab")  # keys of the parser's own options


def check_config(parser: Any, path: Path, shown: str) -> None:
    """Refuse a file that holds no settings of this parser; `shown` is its name as the user gave it.

    Raises:
        SettingError: if it is no YAML, or has an unknown key or a value that is nothing.
    """
    import yaml

    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise SettingError(f"{shown} is no readable YAML file ({reason}); mend it or give --config another.") from error
    if not isinstance(values, dict):
        got = "nothing" if values is None else f"{str(values)[:40]!r}"
        raise SettingError(f"{shown} must hold settings, a line such as {_keys(parser, '')[0]}: VALUE each, got {got}.")
    _check(parser, "", values, shown)


def check_nothing(parser: Any, args: Any) -> None:
    """Refuse null for settings that need a value; the parser lets it pass.

    Raises:
        SettingError: for the first of them.
    """
    for action in parser._actions:
        hint = getattr(action, "_typehint", None)
        if hint is None or action.dest not in args:
            continue
        if action.default is not None and args[action.dest] is None and not may_be_nothing(hint):
            raise SettingError(must_be(parser, action.dest, hint, "None"))
        below = args[action.dest].get("init_args") if settings_class(hint) and args[action.dest] else None
        if below is not None:
            _check_below(parser, action.dest, args[action.dest]["class_path"], below)


def _check(parser: Any, prefix: str, values: dict[Any, Any], shown: str) -> None:
    for name, value in values.items():
        key, legal = f"{prefix}{name}", _keys(parser, prefix)
        if str(name).partition(".")[0] not in legal:
            among = f"; legal are {', '.join(legal)}."
            more = ending(str(name), legal, otherwise=among, show=lambda near, prefix=prefix: repr(f"{prefix}{near}"))
            raise SettingError(f"{shown} has an unknown key {key!r}{more}")
        action = action_of(parser, key)
        hint = getattr(action, "_typehint", None)
        if hint is not None:
            _check_value(parser, key, hint, value, shown)
        elif isinstance(value, dict):
            _check(parser, f"{key}.", value, shown)
        elif _keys(parser, f"{key}.") and not isinstance(value, str):  # a text names another file
            below = _keys(parser, f"{key}.")[0]
            raise SettingError(f"{shown}: {key} must hold settings of its own, such as {below}, got {value!r}.")


def _check_value(parser: Any, key: str, hint: Any, value: Any, shown: str) -> None:
    if value is None and not may_be_nothing(hint):
        raise SettingError(must_be(parser, key, hint, "None", shown))
    kind = settings_class(hint)
    if kind is None or not isinstance(value, dict):
        return
    if CLASS_KEYS & set(map(str, value)):
        for name in map(str, value):
            if name not in CLASS_KEYS:
                more = ending(name, CLASS_KEYS, otherwise=f"; settings of the class stand under {key}.init_args.")
                raise SettingError(f"{shown} has an unknown key {f'{key}.{name}'!r}{more}")
    given: Any = value.get("init_args", value)
    for name, item in given.items() if isinstance(given, dict) else ():
        below = field_hint(kind, str(name))
        if item is None and below is not None and not may_be_nothing(below):
            raise SettingError(must_be(parser, f"{key}.{name}", below, "None", shown))


def _check_below(parser: Any, key: str, class_path: str, values: Any) -> None:
    for name, value in vars(values).items():
        hint = field_hint(imported(class_path), name)
        if value is None and hint is not None and not may_be_nothing(hint):
            raise SettingError(must_be(parser, f"{key}.{name}", hint, "None"))


def _keys(parser: Any, prefix: str) -> list[str]:
    """List the keys one level below a prefix."""
    found = [item.dest for item in parser._actions if item.dest.startswith(prefix) and " --> " not in item.dest]
    names = dict.fromkeys(dest.removeprefix(prefix).partition(".")[0] for dest in found if dest != prefix)
    return [name for name in names if name not in NO_SETTINGS]
