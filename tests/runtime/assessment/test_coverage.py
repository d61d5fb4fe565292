"""Hot sets: chosen on other groups than they are measured on."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from foregate.collect.topology import MoeTopology
from foregate.runtime.assessment.coverage import covered, hot_set_coverage

FOUR = MoeTopology.uniform(1, 4, 1)


def test_ties_go_to_the_smallest_flat_index() -> None:
    assert covered(np.array([1, 1, 0]), np.array([5, 7, 9]), 1) == 5


def test_held_out_and_in_sample_by_hand(row: Any) -> None:
    # half one (groups a, c): experts 0 0 0 1; half two (b): 2 2 1 1
    rows = [row([[0], [0]], "a"), row([[2], [2], [1], [1]], "b"), row([[0], [1]], "c")]
    found = hot_set_coverage(rows, FOUR, [0.25, 0.5, 1.0])
    assert [item["experts"] for item in found] == [1, 2, 4]
    # a quarter: one's hottest is 0 (0 of two's four), two's is 1 (1 of one's four): 1 / 8; in sample 0 or 1: 3 / 8
    assert found[0]["held_out"] == pytest.approx(1 / 8)
    assert found[0]["in_sample"] == pytest.approx(3 / 8)
    # half: one's hottest are 0, 1 (2 of two's), two's are 1, 2 (1 of one's): 3 / 8; in sample 0, 1: 6 / 8
    assert found[1]["held_out"] == pytest.approx(3 / 8)
    assert found[1]["in_sample"] == pytest.approx(6 / 8)
    assert found[2] == {"share": 1.0, "experts": 4, "held_out": 1.0, "in_sample": 1.0}


def test_a_group_is_never_split(row: Any) -> None:
    rows = [row([[0]], "a", group="g"), row([[0]], "b", group="g")]
    assert hot_set_coverage(rows, FOUR, [0.25])[0]["held_out"] is None
    assert hot_set_coverage(rows, FOUR, [0.25])[0]["in_sample"] == 1.0
