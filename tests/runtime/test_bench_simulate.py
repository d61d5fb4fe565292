"""The benchmark of replay: every policy in both ways, on made-up routing and on a trace."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from foregate.collect.errors import SettingError
from foregate.runtime.bench.simulate import TOPOLOGY, SimulateBench, bench, describe, made_up
from foregate.runtime.policies.registry import POLICIES


def test_every_policy_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREGATE_SMOKE", "1")
    result = bench(SimulateBench())
    assert tuple(result["arms"]) == tuple(POLICIES)
    for arm in result["arms"].values():
        assert arm["python_per_s"] > 0
        assert arm.get("compiled_per_s", 1) > 0
    assert (result["accesses"], result["capacity"]) == (200 * 96, 192)
    assert all(name in describe(result) for name in POLICIES)


def test_a_trace_can_be_given(tmp_path: Path) -> None:
    experts = np.random.default_rng(0).integers(0, 4, (40, 2, 1)).astype(np.uint8)
    np.savez(tmp_path / "trace.npz", experts=experts, offsets=np.arange(0, 41, 10))
    result = bench(SimulateBench(trace=str(tmp_path / "trace.npz"), tokens=15, python_tokens=5, capacity=3))
    assert (result["accesses"], result["capacity"]) == (2 * 20, 3), "two rows hold 15 tokens"
    with pytest.raises(SettingError, match="tokens must be at least 1"):
        SimulateBench(tokens=0)


def test_made_up_routing_has_distinct_experts_and_some_that_are_common() -> None:
    rows = made_up(250)
    assert [row.num_tokens for row in rows] == [200, 50]
    chosen = rows[0].experts.reshape(200, TOPOLOGY.num_layers, 4)
    assert all(len(set(token)) == 4 for token in chosen[:, 0].tolist())
    counts = np.bincount(chosen[:, 0].ravel(), minlength=32)
    assert counts.max() > 3 * counts.mean()
