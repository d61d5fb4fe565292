"""Telling the sequences of merged sources apart by the sources' names. Knows paths and rows.

Ids made from a file's base name coincide where two corpora have a file of one name: `my.txt:0` in both. Renamed, they
are `en/my.txt:0` and `de/my.txt:0`, for traces in folders `en` and `de`; where two folders have one name, the number of
the source stands there instead, from 1 on, for every source.

Groups say what may not be divided between training and test. Where ids coincide because names do, groups do for the
same reason and mean different documents, so they are renamed along. Where they mean the same documents, recorded
twice, they must stay equal in all sources, lest a document be trained on and measured; and a sequence without a group
is a group of its own, so that it gets one, its old id.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from .errors import SettingError
from .sequence import SequenceRouting


@dataclass(frozen=True, kw_only=True, slots=True)
class Renaming:
    """Rename the rows of several sources."""

    prefixes: tuple[str, ...]
    """What stands before each source's ids; no two are equal, and each ends with its only slash."""
    keep_groups: bool = False
    """Leave groups as they are, since equal names mean the same document in every source."""

    @classmethod
    def of(cls, sources: Sequence[Path], *, keep_groups: bool = False) -> Renaming:
        """Make the prefixes from the sources' names, or from their numbers where two names are equal.

        Raises:
            SettingError: if a source is given twice.
        """
        places = [os.path.realpath(source) for source in sources]
        twice = next((place for place, count in Counter(places).items() if count > 1), None)
        if twice is not None:
            raise SettingError(f"{twice} is given twice; give each trace once.")
        names = [os.path.basename(os.path.abspath(source)) for source in sources]
        if len(set(names)) < len(names) or not all(map(_is_id, names)):
            names = [str(number) for number in range(1, len(names) + 1)]
        return cls(prefixes=tuple(f"{name}/" for name in names), keep_groups=keep_groups)

    def row(self, row: SequenceRouting, source: int) -> SequenceRouting:
        """Give a row of a source its new id and group."""
        prefix = self.prefixes[source]
        if self.keep_groups:
            group = row.sequence if row.group is None else row.group
        else:
            group = None if row.group is None else prefix + row.group
        return replace(row, sequence=prefix + row.sequence, group=group)


def _is_id(name: str) -> bool:
    """Say whether a name can stand in an id: the root folder has none, and some file systems allow what is no text."""
    return bool(name) and name.encode("utf-8", "ignore").decode() == name
