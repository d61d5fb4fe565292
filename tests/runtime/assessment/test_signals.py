"""Free signals: which experts are absent, which are named, and what that covers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from foregate.collect.topology import MoeTopology
from foregate.runtime.assessment.signals import (
    Candidates,
    candidates,
    coverage_curve,
    free_signals,
    resident_before,
    split,
)
from foregate.runtime.cache import ExpertCache
from foregate.runtime.policies import Lru

TWO = MoeTopology.uniform(2, 4, 1)


def test_whole_groups_are_measured(row: Any) -> None:
    rows = [row([[0]], str(index), group=str(index // 2)) for index in range(20)]
    fitted, measured = split(rows)
    assert {item.group for item in measured} == {"4", "9"}
    assert not {item.group for item in measured} & {item.group for item in fitted}
    assert split(rows[:2]) == (rows[:2], [])
    assert [item.group for item in split(rows[:6])[1]] == ["2", "2"]


def test_what_is_resident_and_missed_is_that_of_the_cache(row: Any) -> None:
    # flat: layer 0 is 0..3, layer 1 is 4..7; capacity 2
    ((resident, missed),) = resident_before([row([[0, 1], [0, 2], [1, 2]])], TWO, ExpertCache(2, Lru()))
    # events: 0 miss {0}; 5 miss {0 5}; 0 hit; 6 miss, 5 leaves {0 6}; 1 miss, 0 leaves {1 6}; 6 hit
    assert np.argwhere(missed).tolist() == [[0, 0, 0], [0, 1, 1], [1, 1, 2], [2, 0, 1]]
    assert np.argwhere(resident).tolist() == [[1, 0, 0], [1, 1, 1], [2, 0, 0], [2, 1, 2]]


def test_candidates_leave_out_first_tokens_resident_and_ruled_out_experts() -> None:
    scores = np.array([[[0.9, 0.1]], [[0.5, 0.0]], [[0.3, 0.7]]], np.float32)
    resident = np.array([[[False, False]], [[False, False]], [[True, False]]])
    missed = np.array([[[True, False]], [[True, True]], [[False, True]]])
    found = candidates(scores, resident, missed)
    assert found.scores.tolist() == pytest.approx([0.5, 0.7])
    assert found.useful.tolist() == [True, True]
    assert (found.misses, found.tokens) == (3, 2)  # one of the three was ruled out by a score of 0


def test_the_best_scores_are_fetched_first_and_ties_count_with_their_mean() -> None:
    found = Candidates(np.array([0.9, 0.5, 0.5, 0.1]), np.array([True, True, False, True]), 4, 2)
    curve = coverage_curve([found], [0.25, 0.5, 0.75, 1.0, 2.0])
    assert [point["covered_misses"] for point in curve] == pytest.approx([0.25, 0.375, 0.5, 0.75, 0.75])
    assert [point["fetched_per_miss"] for point in curve] == [0.25, 0.5, 0.75, 1.0, 1.0]  # four candidates, no more
    assert coverage_curve([Candidates(np.zeros(0), np.zeros(0, bool), 0, 3)]) == []


def test_a_table_foretells_what_follows_from_the_token(random_rows: Any) -> None:
    topology = MoeTopology.uniform(3, 16, 2)
    found = free_signals(random_rows(topology, 20, 40), topology, "causal", 20, 12, Lru, 10_000)
    assert found["reason"] is None
    assert found["chance"] == pytest.approx(2 / 16)
    table = found["signals"]["token_table"]
    assert table["recall"] == pytest.approx(1.0, abs=0.01)
    assert table["coverage"][3]["covered_misses"] > 0.98
    assert found["signals"]["popularity"]["recall"] < 0.5


def test_signals_that_need_ids_or_a_second_layer_are_left_out(row: Any) -> None:
    one = MoeTopology.uniform(1, 4, 1)
    rows = [row([[0], [1], [0]], str(index)) for index in range(5)]
    assert set(free_signals(rows, one, "causal", None, 2, Lru, 100)["signals"]) == {"popularity", "previous_token"}


@pytest.mark.parametrize("tokens", [[[[0, 1]]] * 3, [[[0, 1], [1, 1]]]])
def test_too_little_to_measure_on_is_said(row: Any, tokens: Any) -> None:
    found = free_signals([row(each, str(i)) for i, each in enumerate(tokens)], TWO, "causal", None, 2, Lru, 100)
    assert found["signals"] == {}
    assert "two groups" in found["reason"]
