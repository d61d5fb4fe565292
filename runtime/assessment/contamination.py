"""How much of a trace is the same text again: templates, repeated passages, duplicates. Knows token ids and routing.

Routing of a causal model is a function of the tokens so far, so that a prefix shared by many sequences is one
measurement counted many times, for caches, hot sets and predictors alike (moe-cache-eval, arXiv 2608.07911: prompts
made from one template shift results by 19 to 32 points).

  template   the longest prefix of a sequence that at least `TEMPLATE_GROUPS` groups and `TEMPLATE_SHARE` of them share
  repeated   tokens inside a run of `NGRAM` ids that as many groups hold, anywhere
  again      the longest prefix shared with an earlier sequence of the same group (a conversation's next turn)
  duplicate  all tokens of a sequence that an earlier one equals, whatever the group
"""

# T tokens

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ...collect.trace import SequenceRouting
from ...predictors.rows import group_of

TEMPLATE_GROUPS = 4  # in a small trace two or three documents may begin alike by chance
TEMPLATE_SHARE = 0.05  # in a large trace hundreds begin with "The"; a template is the recording's, not the language's
NGRAM = 16  # ids; running text repeats 16 across documents only where it quotes


def templates(ids: Sequence[np.ndarray], groups: Sequence[str]) -> list[int]:
    """Give the length of each sequence's template prefix."""
    needed = _needed(groups)
    lengths = [0] * len(ids)
    alive = {0: list(range(len(ids)))}  # a prefix of the present depth -> the sequences that have it
    depth = 0
    while alive:
        longer: dict[tuple[int, int], list[int]] = defaultdict(list)
        for prefix, members in alive.items():
            for index in members:
                if len(ids[index]) > depth:
                    longer[prefix, int(ids[index][depth])].append(index)
        depth += 1
        kept = [members for members in longer.values() if len({groups[index] for index in members}) >= needed]
        for members in kept:
            for index in members:
                lengths[index] = depth
        alive = dict(enumerate(kept))
    return lengths


def repeated(ids: Sequence[np.ndarray], groups: Sequence[str], length: int = NGRAM) -> list[np.ndarray]:
    """Mark the tokens inside a run of `length` ids that enough groups hold; bool [T] per sequence."""
    needed = _needed(groups)
    hashes = [_runs(sequence, length) for sequence in ids]
    of_group: dict[str, list[np.ndarray]] = defaultdict(list)
    for group, values in zip(groups, hashes, strict=True):
        of_group[group].append(values)
    once = [np.unique(np.concatenate(values)) for values in of_group.values()]
    seen, counts = np.unique(np.concatenate(once), return_counts=True)
    common = seen[counts >= needed]
    marks = []
    for sequence, values in zip(ids, hashes, strict=True):
        mark = np.zeros(len(sequence), bool)
        for start in np.nonzero(np.isin(values, common))[0]:
            mark[start : start + length] = True
        marks.append(mark)
    return marks


def again(ids: Sequence[np.ndarray], groups: Sequence[str]) -> list[int]:
    """Give how many first tokens of each sequence an earlier one of its group begins with as well."""
    before: dict[str, list[np.ndarray]] = defaultdict(list)
    lengths = []
    for sequence, group in zip(ids, groups, strict=True):
        lengths.append(max((_common(sequence, other) for other in before[group]), default=0))
        before[group].append(sequence)
    return lengths


def duplicates(rows: Sequence[SequenceRouting]) -> list[bool]:
    """Say for each row whether an earlier one has the same tokens, or without token ids the same routing."""
    seen, found = set(), []
    for row in rows:
        values = row.experts if row.token_ids is None else row.token_ids
        kind = b"experts" if row.token_ids is None else b"ids"
        key = (row.stack, kind, hashlib.sha256(np.ascontiguousarray(values).tobytes()).digest())
        found.append(key in seen)
        seen.add(key)
    return found


def contamination(rows: Sequence[SequenceRouting]) -> tuple[dict[str, Any], list[SequenceRouting]]:
    """Measure repetition among the rows of one stack, and give the rows without it.

    Returns:
        ({"by": "token_ids" or "routing" (where a row lacks token ids: only duplicates are known), "groups",
        "duplicate_sequences", shares of all tokens "duplicate", "template", "repeated", "again", "any", and
        "longest_template" in tokens}, the rows with the repeated tokens cut out; empty rows are left out)
    """
    same = duplicates(rows)
    ids = [row.token_ids for row in rows if row.token_ids is not None]
    known = len(ids) == len(rows)
    groups = [group_of(row) for row in rows]
    copies = [np.full(row.num_tokens, copy) for row, copy in zip(rows, same, strict=True)]
    marks: dict[str, list[np.ndarray]] = {"duplicate": copies}
    lengths = templates(ids, groups) if known else []
    if known:
        marks["template"] = [_first(length, row) for length, row in zip(lengths, rows, strict=True)]
        marks["repeated"] = repeated(ids, groups)
        marks["again"] = [_first(length, row) for length, row in zip(again(ids, groups), rows, strict=True)]
    union = [np.logical_or.reduce(of_row) for of_row in zip(*marks.values(), strict=True)]
    total = sum(row.num_tokens for row in rows)
    shares = {name: sum(int(mark.sum()) for mark in of_rows) / max(1, total) for name, of_rows in marks.items()}
    found = {
        "by": "token_ids" if known else "routing",
        "groups": len(set(groups)),
        "duplicate_sequences": sum(same),
        **{name: shares.get(name) for name in ("duplicate", "template", "repeated", "again")},
        "any": sum(int(mark.sum()) for mark in union) / max(1, total),
        "longest_template": max(lengths, default=0) if known else None,
    }
    return found, [_cut(row, ~mark) for row, mark in zip(rows, union, strict=True) if not mark.all()]


def _needed(groups: Sequence[str]) -> int:
    return max(TEMPLATE_GROUPS, int(np.ceil(TEMPLATE_SHARE * len(set(groups)))))


def _first(length: int, row: SequenceRouting) -> np.ndarray:
    return np.arange(row.num_tokens) < length


def _common(one: np.ndarray, other: np.ndarray) -> int:
    least = min(len(one), len(other))
    different = np.nonzero(one[:least] != other[:least])[0]
    return int(different[0]) if len(different) else least


def _runs(ids: np.ndarray, length: int) -> np.ndarray:
    """Give a 64-bit hash of every run of `length` ids; a collision among 10^8 runs has a chance of about 3e-4."""
    if len(ids) < length:
        return np.zeros(0, np.uint64)
    multiplier = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio: odd, bits spread evenly
    hashed = np.zeros(len(ids) - length + 1, np.uint64)
    mixed = (ids.astype(np.int64).astype(np.uint64) + np.uint64(1)) * multiplier
    mixed ^= mixed >> np.uint64(29)
    for offset in range(length):
        hashed = hashed * np.uint64(0xBF58476D1CE4E5B9) + mixed[offset : offset + len(hashed)]
    return hashed


def _cut(row: SequenceRouting, kept: np.ndarray) -> SequenceRouting:
    if kept.all():
        return row
    return replace(
        row,
        experts=row.experts[kept],
        token_ids=None if row.token_ids is None else row.token_ids[kept],
        weights=None if row.weights is None else row.weights[kept],
    )
