"""Prefetch admission: what fits in the link's idle windows, nearest layer and likeliest expert first."""

from __future__ import annotations

import numpy as np
import pytest
from foregate.collect.topology import MoeLayer, MoeTopology
from foregate.runtime.forecast import Forecast
from foregate.runtime.prefetch import SMOOTHING, Prefetcher, Windows

TOPOLOGY = MoeTopology.uniform(3, 4, 2)  # flat 0..3, 4..7, 8..11


def forecast(step: int = 1, **demand: float) -> Forecast:
    """Give a forecast from flat indices, as x5=0.9."""
    values = np.zeros(TOPOLOGY.num_experts, np.float32)
    for name, probability in demand.items():
        values[int(name[1:])] = probability
    return Forecast(step, values)


def prefetcher(read_s: float | None, idle_s: list[float], **settings: float) -> Prefetcher:
    windows = Windows(3)
    windows.read_s, windows.idle_s = read_s, idle_s
    return Prefetcher(TOPOLOGY, windows, **settings)  # type: ignore[arg-type]


def anywhere(expert: int) -> bool:
    return True


def test_the_example_of_the_docstring() -> None:
    plan = prefetcher(0.003, [0.002, 0.002, 0.002]).plan
    said = forecast(x4=0.9, x8=0.9, x9=0.8)
    assert plan(0, said, 0, anywhere) == [8]


def test_nearer_layers_and_likelier_experts_come_first() -> None:
    plan = prefetcher(0.001, [1.0, 1.0, 1.0], limit=9).plan
    said = forecast(x0=1.0, x4=0.6, x5=0.9, x8=0.95, x10=0.7, x11=0.49)
    assert plan(0, said, 0, anywhere) == [5, 4, 8, 10]
    assert plan(1, said, 0, anywhere) == [8, 10]
    assert plan(2, said, 0, anywhere) == []


def test_equal_probabilities_go_by_index() -> None:
    plan = prefetcher(0.001, [1.0, 1.0, 1.0], limit=9).plan
    assert plan(0, forecast(x6=0.8, x4=0.8, x5=0.8), 0, anywhere) == [4, 5, 6]


def test_what_is_there_takes_no_time() -> None:
    plan = prefetcher(0.002, [0.002, 0.002, 0.0], limit=9).plan
    said = forecast(x4=0.9, x5=0.8, x8=0.7)
    assert plan(0, said, 0, lambda expert: expert != 4) == [5, 8]


def test_reads_under_way_come_before() -> None:
    plan = prefetcher(0.002, [0.004, 0.002, 0.0], limit=9).plan
    said = forecast(x4=0.9, x5=0.8, x8=0.7)
    assert plan(0, said, 0, anywhere) == [4, 5, 8]
    assert plan(0, said, 1, anywhere) == [4, 8]
    assert plan(0, said, 2, anywhere) == [8]
    assert plan(0, said, 3, anywhere) == []


def test_a_busy_or_unmeasured_link_gets_nothing() -> None:
    said = forecast(x4=1.0, x8=1.0)
    assert prefetcher(0.001, [0.0, 0.0, 0.0]).plan(0, said, 0, anywhere) == []
    assert prefetcher(None, [1.0, 1.0, 1.0]).plan(0, said, 0, anywhere) == []


def test_limit_and_threshold() -> None:
    said = forecast(x4=0.9, x5=0.4, x6=0.8, x7=0.7)
    assert prefetcher(0.001, [1.0, 1.0, 1.0], limit=2).plan(0, said, 0, anywhere) == [4, 6]
    assert prefetcher(0.001, [1.0, 1.0, 1.0], threshold=0.3).plan(0, said, 0, anywhere) == [4, 6, 7, 5]


def test_a_new_step_is_ranked_anew() -> None:
    plan = prefetcher(0.001, [1.0, 1.0, 1.0]).plan
    assert plan(0, forecast(1, x4=0.9), 0, anywhere) == [4]
    assert plan(0, forecast(2, x7=0.9), 0, anywhere) == [7]


def test_layers_may_differ_in_size() -> None:
    layers = tuple(MoeLayer(stack="causal", block=i, num_experts=n, top_k=1) for i, n in enumerate((2, 5, 3)))
    windows = Windows(3)
    windows.read_s, windows.idle_s = 0.001, [1.0, 1.0, 1.0]
    said = Forecast(1, np.array([1, 1, 0, 0, 0, 0, 1, 1, 0, 0], np.float32))
    assert Prefetcher(MoeTopology(layers=layers), windows).plan(0, said, 0, anywhere) == [6, 7]


def test_windows_follow_what_is_measured() -> None:
    windows = Windows(2)
    windows.note_idle(1, 1.0)
    assert windows.idle_s == [0.0, SMOOTHING]  # from nothing upwards: no guess before it is earned
    for _ in range(200):
        windows.note_idle(1, 1.0)
    assert windows.idle_s[1] == pytest.approx(1.0)
    windows.note_read(2.0)
    assert windows.read_s == 2.0
    windows.note_read(1.0)
    assert windows.read_s == pytest.approx(2.0 - SMOOTHING)
