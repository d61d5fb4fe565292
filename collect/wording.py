"""How numbers and names are said in messages: singular and plural, lists, and the name that was meant. Pure text."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from difflib import get_close_matches


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """Give a number with its noun: 1 sequence, 2 sequences, 0 tokens."""
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


def listed(names: Iterable[str], last: str = "and") -> str:
    """Join names as a sentence has them: a, b and c."""
    *before, end = names
    return f"{', '.join(before)} {last} {end}" if before else end


def ending(name: str, legal: Iterable[str], *, otherwise: str = ".", show: Callable[[str], str] = repr) -> str:
    """End a sentence by the one legal name that is close to a misspelt one, or by `otherwise`."""
    near = get_close_matches(str(name), list(legal), n=1)
    return f"; did you mean {show(near[0])}?" if near else otherwise
