"""Overlap: a trace to follow by hand, and sets compared token by token."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from foregate.collect.topology import MoeTopology
from foregate.runtime.assessment.overlap import chance, overlaps, popularity_level, used_before

ONE = MoeTopology.uniform(1, 4, 1)


def slow(experts: np.ndarray, window: int) -> tuple[int, int]:
    part = whole = 0
    for token in range(window, len(experts)):
        before = {int(e) for earlier in experts[token - window : token] for e in earlier} - {-1}
        own = {int(e) for e in experts[token]} - {-1}
        part, whole = part + len(own & before), whole + len(own)
    return part, whole


def test_the_worked_example_of_the_package(row: Any) -> None:
    (found,) = overlaps([row([[0], [0], [1], [0]])], ONE, [1])
    assert found["overlap"] == pytest.approx(1 / 3)
    assert found["chance"] == 0.25
    assert found["popularity"] == pytest.approx(0.75**2 + 0.25**2)
    assert found["interval"] is None  # one sequence has no spread


def test_windows_count_only_tokens_with_enough_predecessors(row: Any) -> None:
    # tokens 0 1 2 0: of window 2, token 2 uses 2 (before: 0 1), token 3 uses 0 (before: 1 2)
    assert used_before(np.array([[0], [1], [2], [0]]), 4, 2) == (0, 2)
    assert used_before(np.array([[0], [1], [2], [0]]), 4, 3) == (1, 1)
    assert used_before(np.array([[0], [1], [2], [0]]), 4, 4) == (0, 0)


@pytest.mark.parametrize("window", [1, 4, 16])
@pytest.mark.parametrize("seed", range(4))
def test_counts_equal_sets_compared_token_by_token(window: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    experts = np.stack([rng.permutation(8)[:3] for _ in range(40)]).astype(np.int16)
    experts[rng.random(experts.shape) < 0.2] = -1
    assert used_before(experts, 8, window) == slow(experts, window)


def test_sequences_do_not_reach_into_each_other(row: Any) -> None:
    (found,) = overlaps([row([[0], [1]]), row([[1], [1]], "b")], ONE, [1])
    assert found["overlap"] == 0.5


def test_levels_are_those_of_independent_routing() -> None:
    assert chance(2, 8, 1) == 0.25
    assert chance(2, 8, 4) == pytest.approx(1 - 0.75**4)
    assert popularity_level(np.array([10, 0]), 10, 4) == 1.0
    assert popularity_level(np.array([0, 0]), 10, 1) is None
    rng = np.random.default_rng(0)
    experts = rng.choice(4, size=(20_000, 1), p=[0.6, 0.2, 0.15, 0.05])
    part, whole = used_before(experts, 4, 4)
    level = popularity_level(np.bincount(experts[:, 0], minlength=4), len(experts), 4)
    assert part / whole == pytest.approx(level, abs=0.02)


def test_too_short_sequences_give_null(row: Any) -> None:
    (found,) = overlaps([row([[0]])], ONE, [1])
    assert found["overlap"] is None
    assert found["interval"] is None
    assert found["layers"][0]["overlap"] is None
