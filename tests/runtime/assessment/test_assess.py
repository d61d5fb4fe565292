"""The whole assessment on small traces: against the parts, on bad input, without nan, and on the real traces."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from foregate.collect.errors import SettingError, TraceError
from foregate.collect.shard import SequenceRouting
from foregate.collect.topology import MoeLayer, MoeTopology
from foregate.collect.trace import Trace, TraceHeader
from foregate.runtime.assessment import assess as module
from foregate.runtime.assessment.assess import AssessConfig, assess
from foregate.runtime.assessment.curves import capacities_of
from foregate.runtime.assessment.sample import draw, fewer
from foregate.runtime.assessment.tables import lines_of
from foregate.runtime.events import events_of
from foregate.runtime.hardware import HardwareProfile
from foregate.runtime.replay import replay_belady, replay_lru
from foregate.runtime.time_model import ModelSizes

SIZES = ModelSizes(expert_bytes=1e6, dense_bytes=4e6)


class Rows(Trace):
    """A trace of rows in memory."""

    def __init__(self, topology: MoeTopology, rows: list[SequenceRouting], vocab_size: int | None = None) -> None:
        super().__init__(Path("memory"), TraceHeader(topology=topology, model="tiny", vocab_size=vocab_size), [])
        self.held = rows

    def __iter__(self):
        return iter(self.held)


def dumped(values: dict[str, Any]) -> dict[str, Any]:
    """Check that the values are JSON without nan, and that they can be shown."""
    assert json.loads(json.dumps(values, allow_nan=False)) == values
    assert lines_of(values)[0] == values["verdict"]["sentence"]
    return values


@pytest.fixture
def trace(random_rows: Callable[..., Any]) -> Rows:
    topology = MoeTopology.uniform(3, 8, 2)
    return Rows(topology, random_rows(topology), 20)


def test_numbers_are_those_of_replay(trace: Rows) -> None:
    values = dumped(assess(trace, AssessConfig(sequences=100)))
    events = list(events_of(trace, trace.topology, "decode"))
    capacity = values["capacity"]
    assert capacity == 6
    at = values["curves"]["capacities"].index(capacity)
    lru, belady = replay_lru(events, capacity), replay_belady(events, capacity)
    assert values["curves"]["accesses"] == lru.accesses == 12 * 24 * 6
    assert values["curves"]["policies"]["lru"]["misses"][at] == lru.misses
    assert values["curves"]["policies"]["belady"]["misses"][at] == belady.misses
    assert values["curves"]["policies"]["belady"]["recovered_share"] == 1.0
    assert values["gains"]["misses_per_token"]["lru"] == pytest.approx(lru.misses / (12 * 24))
    assert values["gains"]["lru_over_belady"] == pytest.approx(lru.misses / belady.misses)
    assert values["counted"]["drawn"] == "all"
    assert values["curves"]["static_fitted_on"] == "the first fifth of the same events"


def test_belady_is_the_best_at_every_capacity_and_all_experts_miss_once(trace: Rows) -> None:
    used = len(np.unique(events_of(trace, trace.topology, "decode").experts))
    curves = assess(trace, AssessConfig())["curves"]
    for policy in curves["policies"].values():
        for best, misses in zip(curves["policies"]["belady"]["misses"], policy["misses"], strict=True):
            assert best <= misses
        assert policy["misses"][-1] == used
    assert curves["capacities"][-1] == 24


def test_without_a_machine_every_time_is_null(trace: Rows) -> None:
    values = assess(trace, AssessConfig())
    assert values["machine"] is None
    assert values["gains"]["tokens_per_s"] is None
    assert values["gains"]["basis"] == "misses"
    assert values["verdict"]["attainable"] is None
    assert all(policy["tokens_per_s"] is None for policy in values["curves"]["policies"].values())


def test_without_sizes_what_is_missing_is_named(trace: Rows, box: HardwareProfile) -> None:
    values = dumped(assess(trace, AssessConfig(), box))
    assert values["machine"]["missing"]
    assert values["gains"]["tokens_per_s"] is None


def test_on_a_machine_the_limit_is_compute_or_beladys_reads(trace: Rows, box: HardwareProfile) -> None:
    values = dumped(assess(trace, AssessConfig(sequences=100), box, SIZES))
    rates, reads = values["gains"]["tokens_per_s"], values["gains"]["misses_per_token"]
    # per token 4 MB dense and 6 experts of 1 MB at 10 GB/s: 1 ms; a read takes 1 ms
    assert values["machine"]["resident_ms"] == pytest.approx(1.0)
    assert values["machine"]["block_ms"] == pytest.approx(1.0)
    assert 1 / rates["limit"] == pytest.approx(max(1e-3, reads["belady"] * 1e-3))
    assert 1 / rates["lru_prefetched"] == pytest.approx(max(1e-3, reads["lru"] * 1e-3))
    assert 1 / rates["lru"] <= 1e-3 * (1 + reads["lru"])
    assert rates["lru"] <= rates["lru_prefetched_within_forward"] <= rates["lru_prefetched"] <= rates["resident"]
    at = values["curves"]["capacities"].index(values["capacity"])
    assert values["curves"]["policies"]["lru"]["tokens_per_s"][at] == pytest.approx(rates["lru"])
    assert values["gains"]["both"] == pytest.approx(rates["limit"] / rates["lru"])


def test_all_experts_fit(trace: Rows, box: HardwareProfile) -> None:
    values = dumped(assess(trace, AssessConfig(capacity=24), box, SIZES))
    assert values["verdict"]["kind"] == "fits"
    assert values["verdict"]["training"] is False


def test_uniform_routing_is_unpredictable(box: HardwareProfile) -> None:
    topology = MoeTopology.uniform(2, 16, 2)
    rng = np.random.default_rng(0)
    rows = [
        SequenceRouting(
            sequence=str(index),
            experts=np.stack([np.r_[rng.permutation(16)[:2], rng.permutation(16)[:2]] for _ in range(60)]).astype(
                np.int16
            ),
            token_ids=rng.integers(10, size=60).astype(np.int32),
        )
        for index in range(30)
    ]
    values = assess(Rows(topology, rows, 10), AssessConfig(), box, SIZES)
    assert values["verdict"]["kind"] == "unpredictable"


def test_one_layer_one_sequence_and_no_ids(npz: Any) -> None:
    trace = npz(np.array([[[0]], [[1]], [[0]], [[3]]], np.uint8), [4])
    values = dumped(assess(trace, AssessConfig(capacity=2)))
    assert values["signals"]["causal"]["signals"] == {}
    assert values["contamination"]["stacks"]["causal"]["template"] is None
    assert values["coverage"][0]["held_out"] is None
    assert values["curves"]["policies"]["lru"]["misses"][values["curves"]["capacities"].index(2)] == 3


def test_a_single_token(npz: Any) -> None:
    values = dumped(assess(npz(np.array([[[0], [1]]], np.uint8), [1]), AssessConfig(capacity=1)))
    assert values["overlap"][0]["overlap"] is None


def test_top_1_with_dropped_tokens_and_two_stacks(box: HardwareProfile) -> None:
    topology = MoeTopology(
        layers=(
            MoeLayer(stack="encoder", block=1, num_experts=4, top_k=1),
            MoeLayer(stack="encoder", block=3, num_experts=4, top_k=1),
            MoeLayer(stack="decoder", block=1, num_experts=8, top_k=1),
        )
    )
    rng = np.random.default_rng(0)
    rows = []
    for index in range(10):
        for stack, columns, size in (("encoder", 2, 4), ("decoder", 1, 8)):
            experts = rng.integers(size, size=(12, columns)).astype(np.int16)
            experts[rng.random(experts.shape) < 0.25] = -1
            ids = rng.integers(6, size=12).astype(np.int32)
            rows.append(SequenceRouting(sequence=str(index), stack=stack, experts=experts, token_ids=ids))  # pyright: ignore
    for reading in ("decode", "prefill", "recorded"):
        values = dumped(assess(Rows(topology, rows, 6), AssessConfig(reading=reading), box, SIZES))  # pyright: ignore
        assert set(values["signals"]) == set(values["contamination"]["stacks"]) == {"encoder", "decoder"}
        assert 0.15 < values["load"]["dropped"] < 0.35
        assert [layer["stack"] for layer in values["load"]["layers"]] == ["encoder", "encoder", "decoder"]


def test_what_cannot_be_assessed_is_refused(trace: Rows, npz: Any) -> None:
    with pytest.raises(TraceError, match="no tokens to assess"):
        assess(Rows(trace.topology, []), AssessConfig())
    with pytest.raises(TraceError, match="no tokens to assess"):
        assess(
            Rows(trace.topology, [SequenceRouting(sequence="a", experts=np.zeros((0, 6), np.int16))]), AssessConfig()
        )
    dropped = SequenceRouting(sequence="a", experts=np.full((3, 6), -1, np.int16))
    with pytest.raises(TraceError, match="all choices were dropped"):
        assess(Rows(trace.topology, [dropped]), AssessConfig())
    for capacity in (0, 25, 1.5, -0.1, float("nan")):
        with pytest.raises(SettingError, match="capacity"):
            assess(trace, AssessConfig(capacity=capacity))
    with pytest.raises(SettingError, match="prefil'"):
        AssessConfig(reading="prefil")  # pyright: ignore[reportArgumentType]
    with pytest.raises(SettingError, match="sequences must be at least 1, got 0"):
        AssessConfig(sequences=0)


def test_whole_sequences_are_drawn_with_the_seed(trace: Rows, monkeypatch: pytest.MonkeyPatch) -> None:
    one = draw(trace, sequences=5, most_accesses=1, seed=3)
    assert one.num_sequences == 5
    assert [row.num_tokens for row in one.rows] == [24] * 5
    assert [row.sequence for row in one.rows] == sorted(
        (row.sequence for row in one.rows), key=lambda name: int(name[1:])
    )
    assert [row.sequence for row in draw(trace, sequences=5, most_accesses=1, seed=3).rows] == [
        row.sequence for row in one.rows
    ]
    assert {row.sequence for row in draw(trace, sequences=5, most_accesses=1, seed=4).rows} != {
        row.sequence for row in one.rows
    }
    assert draw(trace, sequences=None, most_accesses=3 * 144).num_sequences == 3  # 144 accesses each
    assert draw(trace, sequences=None, most_accesses=1).num_sequences == 1
    assert fewer(one, 2 * 144).num_sequences == 2
    monkeypatch.setattr(module, "MOST_REPLAYED", 3 * 144)
    values = assess(trace, AssessConfig())
    assert values["counted"]["sequences"] == 12
    assert values["replayed"] == {
        "sequences": 3,
        "tokens": 72,
        "of_sequences": 12,
        "of_tokens": 288,
        "drawn": "at random, seed 0",
    }
    assert values["curves"]["static_fitted_on"] == "other sequences"


def test_parts_of_long_sequences_are_one(row: Any) -> None:
    topology = MoeTopology.uniform(1, 4, 1)
    parts = [row([[0], [1]], "a", part=0), row([[1], [1]], "a", part=1), row([[2]], "b")]
    sample = draw(Rows(topology, parts), sequences=None, most_accesses=100)
    assert [len(item.experts) for item in sample.rows] == [4, 1]
    assert sample.num_tokens == sample.total_tokens == 5


@pytest.mark.parametrize(
    ("layers", "experts", "k", "reference", "expected"),
    [
        (32, 8, 2, 64, [2, 32, 64, 128, 192, 256]),
        (24, 32, 4, 192, [4, 48, 96, 192, 384, 576, 768]),
        (1, 8, 1, 2, [1, 2, 4, 6, 8]),
        (1, 1, 1, 1, [1]),
    ],
)
def test_capacities_run_from_top_k_to_all(
    layers: int, experts: int, k: int, reference: int, expected: list[int]
) -> None:
    assert capacities_of(MoeTopology.uniform(layers, experts, k), reference) == expected


def test_mixtral(shared: Path) -> None:
    trace = Trace.open(shared / "traces" / "mixtral-8x7b-instruct_mtbench.npz")
    values = dumped(assess(trace, AssessConfig(sequences=6)))
    assert values["capacity"] == 64
    assert values["overlap"][0]["overlap"] == pytest.approx(0.355, abs=0.02)
    policies = values["curves"]["policies"]
    assert np.less_equal(policies["belady"]["misses"], policies["lru"]["misses"]).all()
