"""Dropping what no text routes like: warm-up batches, stored padding. Knows rows; knows no formats.

Serving engines run forwards of one dummy token, repeated thousands of times, before the first request. The limits are
those of the checks, so that what passes here passes `foregate validate`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np

from ..checks import DUMMY_ROWS, DUMMY_TOKENS
from ..sequence import SequenceRouting
from .report import WARM_UP, ImportReport


def without_dummies(
    rows: Iterable[SequenceRouting], report: ImportReport, rows_per_token: int = 1
) -> Iterator[SequenceRouting]:
    """Yield rows without runs of DUMMY_TOKENS equal tokens and without DUMMY_ROWS equal rows on end.

    A sequence that such a run divides becomes two, the second named with `~2`. At most DUMMY_ROWS rows are held.
    """
    held: list[SequenceRouting] = []  # equal rows, at most DUMMY_ROWS of them
    for row in rows:
        for piece in _without_runs(row, report, rows_per_token):
            if held and not same_routing(held[0], piece):
                yield from _let_go(held, report, rows_per_token)
                held = []
            if len(held) < DUMMY_ROWS:
                held.append(piece)
            else:
                report.drop(WARM_UP, piece.num_tokens * rows_per_token)
    yield from _let_go(held, report, rows_per_token)


def same_routing(a: SequenceRouting, b: SequenceRouting) -> bool:
    """Say whether two rows have the same tokens and experts."""
    if a.stack != b.stack or not np.array_equal(a.experts, b.experts):
        return False
    if a.token_ids is None or b.token_ids is None:
        return a.token_ids is b.token_ids
    return np.array_equal(a.token_ids, b.token_ids)


def cut_tokens(row: SequenceRouting, keep: np.ndarray) -> list[SequenceRouting]:
    """Give the stretches of a row's tokens that are kept, as sequences of their own; `keep` is bool [T].

    Tokens beside a gap do not follow one another, so a row with a gap becomes several sequences: "a", "a~2", ...
    """
    edges = np.flatnonzero(np.diff(np.concatenate([[False], keep, [False]]).astype(np.int8)))
    pieces = []
    for number, (start, stop) in enumerate(edges.reshape(-1, 2).tolist()):
        prompt = row.prompt_tokens
        part = slice(start, stop)
        pieces.append(
            replace(
                row,
                sequence=row.sequence if number == 0 else f"{row.sequence}~{number + 1}",
                prompt_tokens=None if prompt is None else min(max(prompt - start, 0), stop - start),
                experts=row.experts[part],
                token_ids=None if row.token_ids is None else row.token_ids[part],
                weights=None if row.weights is None else row.weights[part],
                scores=None if row.scores is None else row.scores[part],
            )
        )
    return pieces


def _let_go(rows: list[SequenceRouting], report: ImportReport, rows_per_token: int) -> Iterator[SequenceRouting]:
    dummies = len(rows) >= DUMMY_ROWS and rows[0].stack != "decoder"
    if dummies:
        report.drop(WARM_UP, sum(row.num_tokens for row in rows) * rows_per_token)
    else:
        yield from rows


def _without_runs(row: SequenceRouting, report: ImportReport, rows_per_token: int) -> list[SequenceRouting]:
    if row.num_tokens < DUMMY_TOKENS:
        return [row]
    same = (row.experts[1:] == row.experts[:-1]).all(axis=1)
    if row.token_ids is not None:
        same &= row.token_ids[1:] == row.token_ids[:-1]
    edges = np.flatnonzero(np.diff(np.concatenate([[False], same, [False]]).astype(np.int8)))
    keep = np.ones(row.num_tokens, bool)
    for start, stop in edges.reshape(-1, 2).tolist():
        if stop - start + 1 >= DUMMY_TOKENS:
            keep[start : stop + 1] = False
    if keep.all():
        return [row]
    report.drop(WARM_UP, int((~keep).sum()) * rows_per_token)
    return cut_tokens(row, keep)
