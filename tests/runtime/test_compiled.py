"""Compiled replay: the same misses, event by event, as the engine's cache over the policies' own classes."""

from __future__ import annotations

import subprocess
import sys
import types

import numpy as np
import pytest
from foregate.collect.topology import MoeLayer, MoeTopology
from foregate.runtime import compiled
from foregate.runtime.events import Events
from foregate.runtime.policies.registry import SIMULATED, PolicySetting
from foregate.runtime.simulation import miss_counts, python_misses
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("numba", reason="numba (foregate[fast]) is not installed")

TOPOLOGY = MoeTopology(
    layers=tuple(MoeLayer(stack="causal", block=i, num_experts=n, top_k=k) for i, (n, k) in enumerate(((4, 2), (6, 3))))
)
OFFSETS = TOPOLOGY.offsets


@st.composite
def drawn_events(draw: st.DrawFn) -> Events:
    """Draw events of both layers, many of them larger than small caches, over a few sequences."""
    random = np.random.default_rng(draw(st.integers(0, 1 << 16)))
    length = draw(st.integers(0, 80))
    experts: list[int] = []
    layers, starts = random.integers(0, 2, length), [0]
    singles = random.random(length) < draw(st.sampled_from([0.0, 0.5, 1.0]))
    for layer in layers:
        size = TOPOLOGY.layers[layer].num_experts
        count = random.integers(1, draw(st.integers(1, size)) + 1)
        experts += sorted((OFFSETS[layer] + random.choice(size, count, replace=False)).tolist())
        starts.append(len(experts))
    return Events(
        experts=np.array(experts, np.int32),
        starts=np.array(starts, np.int64),
        layers=layers.astype(np.int32),
        steps=np.arange(length),
        tokens=np.where(singles, 1, 5).astype(np.int32),
        sequences=np.sort(random.integers(0, 3, length)).astype(np.int32),
        num_tokens=length,
    )


@pytest.mark.parametrize("policy", SIMULATED)
@given(events=drawn_events(), capacity=st.integers(1, 10), seed=st.integers(0, 3))
@settings(max_examples=80, deadline=None)
def test_compiled_replay_is_the_engines(policy: str, events: Events, capacity: int, seed: int) -> None:
    load = np.random.default_rng(seed).integers(0, 4, TOPOLOGY.num_experts)
    future = [event.needed for event in events]
    setting = PolicySetting(topology=TOPOLOGY, capacity=capacity, future=future, load=load, seed=seed)
    quick = compiled.replays()[policy](events, setting)
    assert quick.dtype == np.int32
    assert quick.tolist() == python_misses(events, policy, setting).tolist()


def test_every_policy_of_a_replay_has_a_compiled_one() -> None:
    assert set(compiled.replays()) == set(SIMULATED)
    assert compiled.how_replayed().startswith("code compiled by numba")


def test_without_numba_replay_runs_in_python_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    events = one_sequence()
    quick = miss_counts(events, 2, "lru", TOPOLOGY)
    monkeypatch.setitem(sys.modules, "numba", None)  # an import of it fails
    for memo in (compiled.replays, compiled._numba):
        memo.cache_clear()
        monkeypatch.setattr(compiled, memo.__name__, memo.__wrapped__)
    assert compiled.replays() == {}
    assert "numba cannot be used" in compiled.how_replayed()
    assert miss_counts(events, 2, "lru", TOPOLOGY).tolist() == quick.tolist()


@pytest.mark.parametrize("disabled", [False, True])
def test_code_that_numba_does_not_compile_is_not_called_compiled(
    disabled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    import numba

    class Broken(types.ModuleType):
        def __getattr__(self, name: str) -> None:
            raise OSError("libllvmlite.so: cannot open shared object file")

    if disabled:
        monkeypatch.setattr(numba.config, "DISABLE_JIT", 1)
    else:
        monkeypatch.setitem(sys.modules, "numba", Broken("numba"))
    for memo in (compiled.replays, compiled._numba):
        monkeypatch.setattr(compiled, memo.__name__, memo.__wrapped__)
    assert compiled.replays() == {}
    reason = "NUMBA_DISABLE_JIT is set" if disabled else "libllvmlite.so: cannot open"
    assert f"Python, since numba cannot be used ({reason}" in compiled.how_replayed()


def one_sequence() -> Events:
    return Events(
        experts=np.array([0, 1, 2, 0], np.int32),
        starts=np.arange(5),
        layers=np.zeros(4, np.int32),
        steps=np.arange(4),
        tokens=np.ones(4, np.int32),
        sequences=np.zeros(4, np.int32),
        num_tokens=4,
    )


def test_a_folder_that_cannot_be_written_means_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    from foregate.runtime.compiled import jit

    asked = []

    def njit(loop=None, *, cache: bool = False):
        asked.append(cache)
        if cache:
            raise RuntimeError("no locator available")
        return loop

    monkeypatch.setattr(jit, "njit", lambda *args, **keys: (lambda loop: njit(loop, **keys)) if keys else njit(*args))
    assert jit.compiled(abs) is abs
    assert asked == [True, False]


@pytest.mark.parametrize("module", ["foregate.runtime", "foregate.runtime.simulation", "foregate.runtime.compiled"])
def test_numba_and_torch_are_not_imported_before_they_are_used(module: str) -> None:
    probe = f"import sys, {module}; print(sorted({{'numba', 'torch'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
