"""A part of a trace's sequences as a sequence of rows whose arrays are read when they are asked for.

So that whoever sorts, counts or keeps the rows of a trace that is larger than memory does not read it for that. Knows
the row source and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any, overload

import numpy as np

from ..collect.topology import Stack
from ..collect.trace import SequenceRouting
from .row_source import RowSource


class LazyRow(SequenceRouting):
    """Stand for one sequence; arrays are copies, so that one that is kept does not keep its row group.

    `dataclasses.replace` gives a plain row.
    """

    __slots__ = ("_number", "_source")
    _number: int
    _source: RowSource

    def __new__(cls, source: RowSource | None = None, number: int = 0, **values: Any) -> Any:
        """Stand for a sequence of a source; values of fields make a plain row."""
        return SequenceRouting(**values) if source is None else object.__new__(cls)

    def __init__(self, source: RowSource, number: int) -> None:  # not the dataclass's: nothing is stored
        object.__setattr__(self, "_source", source)
        object.__setattr__(self, "_number", number)

    def __repr__(self) -> str:
        return f"LazyRow({self.sequence!r}, {self.num_tokens} tokens)"

    @property
    def num_tokens(self) -> int:
        """Tokens of the sequence."""
        return int(self._source.lengths_N[self._number])

    @property
    def sequence(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Id, unique in the trace."""
        return self._source.names[self._number]

    @property
    def group(self) -> str | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """What must not be split between training and test."""
        return self._source.groups[self._number]

    @property
    def stack(self) -> Stack:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Stack of the row."""
        return self._source.stack

    @property
    def part(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Always 0: parts are joined."""
        return 0


def _read(name: str) -> property:
    """Make a property that reads a field's value from the source."""

    def read(row: LazyRow) -> Any:
        value = getattr(row._source.row(row._number), name)
        return value.copy() if isinstance(value, np.ndarray) else value

    return property(read, doc=f"The sequence's {name}, read now.")


for _field in fields(SequenceRouting):
    if _field.name not in vars(LazyRow):
        setattr(LazyRow, _field.name, _read(_field.name))


class Rows(Sequence[SequenceRouting]):
    """Hold sequences of a source by their numbers, in an order of its own."""

    def __init__(self, source: RowSource, numbers: np.ndarray) -> None:
        self.source, self.numbers = source, numbers

    def __len__(self) -> int:
        return len(self.numbers)

    @overload
    def __getitem__(self, index: int) -> SequenceRouting: ...
    @overload
    def __getitem__(self, index: slice) -> Rows: ...
    def __getitem__(self, index: int | slice) -> SequenceRouting | Rows:
        if isinstance(index, slice):
            return Rows(self.source, self.numbers[index])
        return LazyRow(self.source, int(self.numbers[index]))

    def __add__(self, other: Rows) -> Rows:
        assert other.source is self.source
        return Rows(self.source, np.concatenate([self.numbers, other.numbers]))

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each sequence, int64."""
        return self.source.lengths_N[self.numbers]

    @property
    def num_tokens(self) -> int:
        """Tokens of all sequences."""
        return int(self.lengths.sum())

    def span(self, index: int, start: int, stop: int) -> SequenceRouting:
        """Give tokens start..stop of a sequence, which stay valid as long as they are kept."""
        return self.source.span(int(self.numbers[index]), start, stop)
