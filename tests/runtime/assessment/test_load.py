"""Load balance: values worked out by hand, and the definitions written out slowly."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from foregate.collect.topology import MoeLayer, MoeTopology
from foregate.runtime.assessment.load import balance, balances, dropped_of, load_of


def test_uniform_load() -> None:
    assert balance(np.array([5, 5, 5, 5])) == {
        "entropy": pytest.approx(1.0),
        "effective_experts": pytest.approx(4.0),
        "max_over_mean": 1.0,
        "gini": 0.0,
        "never_used": 0.0,
    }


def test_all_on_one_expert() -> None:
    # the Gini coefficient of one owner among n is (n - 1) / n
    assert balance(np.array([0, 8, 0, 0])) == {
        "entropy": 0.0,
        "effective_experts": 1.0,
        "max_over_mean": 4.0,
        "gini": 0.75,
        "never_used": 0.75,
    }


def test_three_to_one() -> None:
    found = balance(np.array([3, 1]))
    nats = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    assert found["entropy"] == pytest.approx(nats / math.log(2)) == pytest.approx(0.8113, abs=1e-4)
    assert found["effective_experts"] == pytest.approx(math.exp(nats))
    assert found["max_over_mean"] == 1.5
    assert found["gini"] == pytest.approx(0.25)


def test_nothing_counted_and_one_expert_have_no_numbers() -> None:
    assert balance(np.zeros(4)) == {
        "entropy": None,
        "effective_experts": None,
        "max_over_mean": None,
        "gini": None,
        "never_used": 1.0,
    }
    assert balance(np.array([7]))["entropy"] is None
    assert balance(np.array([7]))["effective_experts"] == 1.0


@pytest.mark.parametrize("seed", range(5))
def test_gini_is_the_mean_difference_over_twice_the_mean(seed: int) -> None:
    load = np.random.default_rng(seed).integers(0, 30, size=9)
    slow = sum(abs(a - b) for a in load for b in load) / (2 * len(load) ** 2 * load.mean())
    assert balance(load)["gini"] == pytest.approx(slow)


def test_layers_of_different_sizes_and_dropped_choices(row: Any) -> None:
    topology = MoeTopology(
        layers=(
            MoeLayer(stack="causal", block=0, num_experts=2, top_k=1),
            MoeLayer(stack="causal", block=1, num_experts=4, top_k=2),
        )
    )
    rows = [row([[0, 1, 3], [0, -1, 3]]), row([[1, 3, 0]], "b")]
    load = load_of(rows, topology)
    assert load.tolist() == [[2, 1, 0, 0], [1, 1, 0, 3]]
    assert dropped_of(rows) == pytest.approx(1 / 9)
    found = balances(load, topology)
    assert [layer["experts"] for layer in found["layers"]] == [2, 4]
    assert [layer["never_used"] for layer in found["layers"]] == [0.0, 0.25]
    assert found["never_used"] == pytest.approx(1 / 6)
    assert found["mean"]["max_over_mean"] == pytest.approx((2 / 1.5 + 3 / 1.25) / 2)
