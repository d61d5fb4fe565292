"""What is wrong with a command line, in the user's words. Knows parsers and what jsonargparse says; no sub-command.

jsonargparse names a setting by its key in a namespace and a type by its Python name. Here the setting is named as it is
typed (`--max-tokens`, or file and key), and the type by what is legal. Texts that are not known are passed on.
"""

from __future__ import annotations

import argparse
import importlib
import re
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from ..collect.wording import ending, listed
from .legal import field_hint, legal_values, names_of, settings_class

LONGEST = 80  # characters of a value that are repeated
UNKNOWN, MISSING = "unrecognized arguments: ", "the following arguments are required: "
NESTED = re.compile(r"NestedArg\(key='[^']*', val=(.*)\)$", re.MULTILINE)
CLASS = re.compile(r"Problem with given class_path '([^']+)'")
NOT_ACCEPTED = re.compile(r"Option '([^']+)' is not accepted")
LINKED = re.compile(r"argument (\S+) --> (\S+): ")
OF_ONE = re.compile(r"argument (\S+): (.*)", re.DOTALL)


def explain(parser: Any, error: Exception, words: Sequence[str]) -> str:
    """Say in one sentence what is wrong with the words that a parser refused."""
    parser, words = _chosen(parser, words)
    text = str(error)
    if text.startswith((UNKNOWN, MISSING)):
        unknown = _unknown_option(parser, words)
        if unknown is not None:
            return unknown
    if text.startswith(UNKNOWN):
        return _too_many(parser, text.removeprefix(UNKNOWN).split()[0])
    if text.startswith(MISSING):
        return missing(parser, text.removeprefix(MISSING).split(", "))
    if text.startswith("expected ") and _commands(parser):
        return f"NAME is missing; usage: {parser.prog} NAME [options], with one of {', '.join(_commands(parser))}."
    linked = LINKED.match(text)
    if linked is not None:
        return f"--{linked[2]} follows from {spelled(parser, linked[1])}; give that alone."
    of_one = OF_ONE.fullmatch(text)
    if of_one is not None:
        return _of_one(parser, of_one[1], of_one[2], words)
    of_class = re.match(r"(--\S+)\.help: ", text)
    if of_class is not None:
        legal = ", ".join(names_of(parser._option_string_actions[of_class[1]]._typehint)) or "settings"
        return f"{of_class[1]}.help must be the name of a class, one of {legal}; leave it out for the default one."
    return wrong_value(parser, text, words) or f"{_plain(text)}; {parser.prog} --help lists what is legal."


def wrong_value(parser: Any, text: str, words: Sequence[str] = (), file: str | None = None) -> str | None:
    """Say what a setting must be, from jsonargparse's text; None where that is another one."""
    keys = list(dict.fromkeys(re.findall(r'Parser key "([^"]+)"', text)))
    action = action_of(parser, keys[0]) if keys else None
    if action is None:
        return None
    key, hint, given_class = keys[0], getattr(action, "_typehint", None), CLASS.search(text)
    kind = imported(given_class[1]) if given_class else None
    refused = NOT_ACCEPTED.search(text)
    between = ".init_args." if file else "."
    if kind is not None and refused:
        legal = [item.name for item in fields(kind)]
        wanted = ending(refused[1], legal, otherwise=f"; legal are {', '.join(legal)}.")
        return f"{spelled(parser, key, file)} has no setting {refused[1]!r}{wanted}"
    if kind is not None and len(keys) > 1:
        hint, key = field_hint(kind, keys[1]), f"{key}{between}{keys[1]}"
    value = _value(text, nested=len(keys) > 1)
    required = [item.dest for item in parser._actions if item.required]
    if value == "None" and key in required and not file:
        return missing(parser, [item for item in required if not _given(parser, item, words)] or [key])
    return must_be(parser, key, hint, value, file)


def must_be(parser: Any, key: str, hint: Any, value: str, file: str | None = None) -> str:
    """Say what a setting must be and what it is."""
    name = spelled(parser, key, file)
    shown = "nothing" if value in ("None", "") else value if value[0] in "[{'\"" else repr(value)
    shown = shown if len(shown) <= LONGEST else f"{shown[:LONGEST]}..."
    action = action_of(parser, key)
    below = [flag for flag in options_of(parser) if flag.startswith(f"--{key}.")]
    if hint is None and action is not None and below:
        return f"{name} must be a YAML file with its settings, got {shown}; one by one they are {below[0]} and so on."
    kind = settings_class(hint)
    more = ending(value.strip("'\""), names_of(hint))
    if kind is not None and not names_of(hint):
        more = f"; they are {', '.join(f'{key}.{item.name}' for item in fields(kind))}."
    return f"{name} must be {legal_values(hint)}, got {shown}{more}"


def missing(parser: Any, keys: Sequence[str]) -> str:
    """Say which required arguments are missing, and give the shortest command that has all."""
    required = [item for item in parser._actions if item.required and " --> " not in item.dest]
    usage = [_usage(item) for item in sorted(required, key=lambda item: bool(item.option_strings))]
    names = [spelled(parser, key) for key in keys]
    whole = " ".join([parser.prog, *usage, "[options]"])
    return f"{listed(names)} {'is' if len(names) == 1 else 'are'} missing; usage: {whole}."


def named_as_typed(parser: Any, text: str, words: Sequence[str]) -> str:
    """Begin a sentence "max_tokens must be ..." by the option, where one has that name."""
    parser, words = _chosen(parser, words)
    name, must, rest = text.partition(" must ")
    plain = name.replace("-", "_")
    flags = {flag: flag.lstrip("-").replace("-", "_") for flag in options_of(parser)}
    found = [flag for flag, key in flags.items() if key == plain or key.endswith(f".{plain}")]
    typed = [flag for flag in found if _given(parser, flags[flag], words)]
    found = typed or [flag for flag in found if flags[flag] == plain] or found
    return f"{found[0]}{must}{rest}" if must and len(found) == 1 else text


def spelled(parser: Any, key: str, file: str | None = None) -> str:
    """Give the name of a setting as it is typed: an option, a positional argument, or file and key."""
    if file is not None:
        return f"{file}: {key}"
    action = action_of(parser, key)
    if action is None:
        return f"--{key}"
    return action.option_strings[0] if action.option_strings else _usage(action)


def action_of(parser: Any, key: str) -> Any:
    """Find a parser's action by its key; None where there is none."""
    return next((item for item in parser._actions if item.dest == key and " --> " not in item.dest), None)


def options_of(parser: Any) -> list[str]:
    """List the options as they are typed, with dashes."""
    found = [item.option_strings[0] for item in parser._actions if item.option_strings]
    return [flag for flag in found if " --> " not in flag and not flag.endswith(".help")]


def imported(path: str) -> Any:
    """Import a class by its path; None where there is none."""
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name, None)
    except (ImportError, ValueError):
        return None


def _chosen(parser: Any, words: Sequence[str]) -> tuple[Any, Sequence[str]]:
    """Go down to the sub-command that was named, such as that of foregate bench."""
    below = _commands(parser)
    place = next((index for index, word in enumerate(words) if word in below), None)
    return (parser, words) if place is None else (below[words[place]], words[place + 1 :])


def _commands(parser: Any) -> dict[str, Any]:
    found = (item for item in parser._actions if isinstance(item, argparse._SubParsersAction))
    return next((dict(item._name_parser_map) for item in found), {})


def _unknown_option(parser: Any, words: Sequence[str]) -> str | None:
    """Find the first option that there is not."""
    end = words.index("--") if "--" in words else len(words)
    known = parser._option_string_actions
    nested = [flag for flag, action in known.items() if settings_class(getattr(action, "_typehint", None))]
    for word in words[:end]:
        name = word.partition("=")[0]
        number = re.fullmatch(r"-[\d.]+(e[+-]?\d+)?", name, re.IGNORECASE)
        if name in known or not name.startswith("-") or name == "-" or number:
            continue
        if any(name.startswith(f"{flag}.") for flag in nested):
            continue
        lists = f"; {parser.prog} --help lists the options."
        return f"there is no option {name}{ending(name, options_of(parser), otherwise=lists, show=str)}"
    return None


def _too_many(parser: Any, word: str) -> str:
    taken = [_usage(item) for item in parser._actions if not item.option_strings and " --> " not in item.dest]
    if not taken:
        first = next((item for item in parser._actions if item.required), None)
        such = f", such as {_usage(first).partition(' ')[0]} {word}" if first else ""
        return f"{word!r} stands without an option; give it to one{such}, or leave it out."
    return f"{word!r} is one argument too many; {parser.prog} takes {' '.join(taken)} and options."


def _of_one(parser: Any, name: str, said: str, words: Sequence[str]) -> str:
    """Translate what argparse says of one argument."""
    name = name.partition("/")[0]  # the first of several spellings
    choice = re.match(r"invalid choice: '([^']*)'", said)
    if choice:
        legal = _commands(parser)
        return f"{name} must be one of {', '.join(legal)}, got {choice[1]!r}{ending(choice[1], legal)}"
    action = parser._option_string_actions.get(name)
    if action is not None and said.startswith("expected "):
        return f"{name} needs a value and got none; give {_usage(action)}, which {parser.prog} --help explains."
    value = re.match(r"ignored explicit argument '([^']*)'", said)
    if value:
        return f"{name} takes no value, got {value[1]!r}; give {name} alone."
    return f"{name}: {_plain(said)}; {parser.prog} --help lists what is legal."


def _usage(action: Any) -> str:
    name = action.metavar or action.dest.rpartition(".")[2]
    if not action.option_strings:
        return f"{name} [{name} ...]" if action.nargs == "+" else str(name)
    return f"{action.option_strings[0]} {action.metavar or name.upper()}"


def _given(parser: Any, key: str, words: Sequence[str]) -> bool:
    flags = [flag for flag, action in parser._option_string_actions.items() if action.dest == key]
    return any(word.partition("=")[0] in flags for word in words)


def _value(text: str, *, nested: bool) -> str:
    typed = NESTED.search(text)
    if typed:
        return typed[1]
    whole = None if nested else re.search(r"^\s*Given value: (.*)$", text, re.MULTILINE)
    found = whole or re.search(r"Got value: (.*)$", text, re.MULTILINE)
    return found[1].strip() if found else re.sub(r".*Unable to load config ['\"](.*?)['\"].*", r"\1", _plain(text))


def _plain(text: str) -> str:
    return re.sub(r"<class '([\w.]+)'>", r"\1", " ".join(text.split())).rstrip(".")
