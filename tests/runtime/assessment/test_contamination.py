"""Repetition: templates, runs, next turns and duplicates in traces small enough to count."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from foregate.runtime.assessment.contamination import again, contamination, duplicates, repeated, templates


def arrays(*sequences: list[int]) -> list[np.ndarray]:
    return [np.array(sequence, np.int32) for sequence in sequences]


def test_a_template_is_a_prefix_that_four_groups_share() -> None:
    ids = arrays([1, 2, 3, 9], [1, 2, 3, 8], [1, 2, 7], [1, 2, 3, 9, 9], [5, 5], [1, 2])
    assert templates(ids, list("abcdef")) == [2, 2, 2, 2, 0, 2]  # 1 2 is shared by five, 1 2 3 by three only
    assert templates(ids, ["a", "a", "a", "d", "e", "f"]) == [0] * 6  # by three groups


def test_a_template_must_be_frequent_where_there_are_many_groups() -> None:
    ids = arrays(*([1, 2, index] for index in range(5)), *([index] for index in range(100, 195)))
    groups = [str(index) for index in range(100)]
    assert templates(ids, groups)[:5] == [2] * 5  # 5 of 100 groups
    assert templates(ids[1:], groups[1:])[:4] == [0] * 4  # 4 of 99 are less than 5 %


@pytest.mark.parametrize("seed", range(4))
def test_templates_equal_prefixes_counted_one_by_one(seed: int) -> None:
    rng = np.random.default_rng(seed)
    ids = [rng.integers(2, size=rng.integers(1, 7)) for _ in range(20)]
    groups = [str(rng.integers(9)) for _ in ids]
    slow = []
    for sequence in ids:
        lengths = [
            length
            for length in range(1, len(sequence) + 1)
            if len(
                {
                    g
                    for other, g in zip(ids, groups, strict=True)
                    if other[:length].tolist() == sequence[:length].tolist()
                }
            )
            >= 4
        ]
        slow.append(max(lengths, default=0))
    assert templates(ids, groups) == slow


def test_runs_are_found_anywhere_and_only_in_enough_groups() -> None:
    run = [7, 8, 9]
    ids = arrays([1, *run, 2], [*run], [3, 4, *run], [5, *run, *run], [7, 8])
    marks = repeated(ids, list("abcde"), length=3)
    assert [mark.tolist() for mark in marks] == [
        [False, True, True, True, False],
        [True] * 3,
        [False, False, True, True, True],
        [False, *[True] * 6],
        [False, False],
    ]
    assert not any(mark.any() for mark in repeated(ids, list("aaaae"), length=3))


@pytest.mark.parametrize("seed", range(3))
def test_runs_equal_tuples_counted_one_by_one(seed: int) -> None:
    rng = np.random.default_rng(seed)
    ids = [rng.integers(3, size=rng.integers(0, 15)) for _ in range(12)]
    groups = [str(index) for index in range(12)]
    held = Counter(run for sequence in ids for run in {tuple(sequence[i : i + 4]) for i in range(len(sequence) - 3)})
    for sequence, mark in zip(ids, repeated(ids, groups, length=4), strict=True):
        slow = [
            any(held[tuple(sequence[i : i + 4])] >= 4 for i in range(max(0, t - 3), min(t, len(sequence) - 4) + 1))
            for t in range(len(sequence))
        ]
        assert mark.tolist() == slow


def test_the_next_turn_of_a_conversation_begins_again() -> None:
    ids = arrays([1, 2, 3], [1, 2, 3, 4, 5], [1, 2], [1, 2, 3, 4])
    assert again(ids, ["a", "a", "b", "a"]) == [0, 3, 0, 4]


def test_duplicates_are_by_ids_or_without_them_by_routing(row: Any) -> None:
    same_ids = [row([[0]], "a", [5]), row([[1]], "b", [5]), row([[0]], "c", [6])]
    assert duplicates(same_ids) == [False, True, False]
    assert duplicates([row([[0]], "a"), row([[0]], "b"), row([[1]], "c")]) == [False, True, False]


def test_shares_and_what_is_left(row: Any) -> None:
    rows = [row([[0], [1], [index]], str(index), [1, 2, 10 + index]) for index in range(4)]
    rows.append(row([[0], [1], [0]], "copy", [1, 2, 10]))
    found, kept = contamination(rows)
    assert found["by"] == "token_ids"
    assert found["duplicate_sequences"] == 1
    assert found["duplicate"] == pytest.approx(3 / 15)
    assert found["template"] == pytest.approx(10 / 15)
    assert found["repeated"] == 0.0
    assert found["any"] == pytest.approx(11 / 15)
    assert found["longest_template"] == 2
    assert [(item.sequence, item.token_ids.tolist(), item.experts.tolist()) for item in kept] == [
        (str(index), [10 + index], [[index]]) for index in range(4)
    ]


def test_without_token_ids_only_duplicates_are_known(row: Any) -> None:
    found, kept = contamination([row([[0], [1]], "a"), row([[0], [1]], "b")])
    assert found["by"] == "routing"
    assert (found["template"], found["repeated"], found["again"], found["longest_template"]) == (None,) * 4
    assert found["duplicate"] == found["any"] == 0.5
    assert [item.sequence for item in kept] == ["a"]
