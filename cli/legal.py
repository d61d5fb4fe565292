"""What a setting may hold, said in words: from its type hint, as the parser checks it. Knows types, no parser."""

from __future__ import annotations

import types
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from ..collect.wording import listed

PLAIN = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", Path: "a path"}
SEVERAL = {int: "whole numbers such as [0, 1]", float: "numbers such as [0.5, 0.9]", str: "texts such as [a, b]"}
LISTS = (list, tuple, set)


def legal_values(hint: Any) -> str:
    """Say what is legal, to follow "must be"."""
    kinds = alternatives(hint)
    if int in kinds and float in kinds:
        kinds.remove(int)  # a whole number is a number
    return listed([_legal_value(kind) for kind in kinds], "or")


def names_of(hint: Any) -> list[str]:
    """List the legal names, where it is names that are legal: those of a Literal, or of a family's classes."""
    found = []
    for kind in alternatives(hint):
        if get_origin(kind) is Literal:
            found += [str(item) for item in get_args(kind)]
        elif isinstance(kind, type) and is_dataclass(kind):
            found += [item.__name__ for item in families(kind)]
    return found


def may_be_nothing(hint: Any) -> bool:
    """Say whether None is a legal value."""
    return hint is None or hint is Any or type(None) in _parts(hint)


def alternatives(hint: Any) -> list[Any]:
    """List the types of a union, None left out."""
    return [kind for kind in _parts(hint) if kind is not type(None)]


def families(kind: type) -> list[type]:
    """List the classes that a settings class stands for: those derived from it."""
    return [item for child in kind.__subclasses__() for item in (child, *families(child))]


def settings_class(hint: Any) -> type | None:
    """Give the class whose fields are settings below this one, where there is one."""
    return next((kind for kind in alternatives(hint) if isinstance(kind, type) and is_dataclass(kind)), None)


def field_hint(kind: type, name: str) -> Any:
    """Give the type hint of a class's field; None where it has no such field."""
    return get_type_hints(kind).get(name)


def _parts(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _legal_value(kind: Any) -> str:
    origin = get_origin(kind)
    if origin is Literal:
        return f"one of {', '.join(map(str, get_args(kind)))}"
    if origin in LISTS:
        return f"a list of {SEVERAL.get(get_args(kind)[0], 'values')}"
    if isinstance(kind, type) and is_dataclass(kind):
        below = [item.__name__ for item in families(kind)]
        return f"the name of a settings class, {', '.join(below)}" if below else "settings of its own, one by one"
    return PLAIN.get(kind, f"of the type {getattr(kind, '__name__', kind)}")
