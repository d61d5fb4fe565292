"""Foresight: a predictor's forecasts of a trace, forward by forward, beside a plain loop over its steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from foregate.collect.errors import SettingError
from foregate.collect.shard import SequenceRouting
from foregate.collect.topology import MoeLayer, MoeTopology
from foregate.predictors.base import Prediction, PredictorSpec, Step
from foregate.predictors.baselines import LayerPair
from foregate.predictors.rows import dense, fingerprint, many_hot
from foregate.runtime import foresight
from foregate.runtime.events import events_of
from foregate.runtime.forecast import FlatMap, union
from foregate.runtime.foresight import Unseen, check_foresight, forecasts_of

CAUSAL = MoeTopology(
    layers=tuple(MoeLayer(stack="causal", block=i, num_experts=n, top_k=2) for i, n in enumerate((4, 3)))
)
BOTH = MoeTopology(
    layers=(
        MoeLayer(stack="encoder", block=0, num_experts=3, top_k=1),
        MoeLayer(stack="decoder", block=0, num_experts=4, top_k=1),
    )
)


def spec_of(topology: MoeTopology, horizon: str, stack: str = "causal") -> PredictorSpec:
    return PredictorSpec(family="test", horizon=horizon, topology=topology, stack=stack, vocab_size=9)  # type: ignore[arg-type]


def row(name: str, tokens: int, stack: str = "causal", topology: MoeTopology = CAUSAL, **more: Any) -> SequenceRouting:
    random = np.random.default_rng([tokens, *name.encode()])
    sizes = [topology.layers[layer] for layer in topology.layers_of(stack)]  # type: ignore[arg-type]
    chosen = [
        np.argsort(random.random((tokens, layer.num_experts)), axis=1)[:, : layer.top_k].astype(np.int16)
        for layer in sizes
    ]
    ids = random.integers(0, 9, tokens).astype(np.int32)
    return SequenceRouting(sequence=name, stack=stack, experts=np.concatenate(chosen, axis=1), token_ids=ids, **more)  # type: ignore[arg-type]


class Counting:
    """A token predictor whose scores say everything that it was told; it counts its steps."""

    def __init__(self, spec: PredictorSpec, *, reuse: bool = True) -> None:
        self.spec, self.reuse, self.steps, self.largest = spec, reuse, 0, 0

    def start(self, batch: int) -> dict[str, np.ndarray]:
        return {"sum": np.zeros((batch, *self.spec.shape), np.float32)}

    def step(self, step: Step, state: object) -> tuple[Prediction, dict[str, np.ndarray]]:
        assert isinstance(state, dict)
        self.steps, self.largest = self.steps + 1, max(self.largest, len(step.token_ids))
        total = 0.5 * state["sum"] + step.previous
        said = total / 2 + 0.01 * step.token_ids[:, None, None].astype(np.float32)
        return Prediction(said, 3 - said if self.reuse else None), {"sum": total}


def stepped(predictor: Counting, of: SequenceRouting) -> list[tuple[np.ndarray, np.ndarray]]:
    """Give (demand, reuse) of every token of one sequence, one step after the other."""
    flat_map, state, said = FlatMap(predictor.spec, predictor.spec.topology), predictor.start(1), []
    used = many_hot(dense(of, predictor.spec.topology), predictor.spec.shape[1])
    assert of.token_ids is not None
    for token in range(of.num_tokens):
        previous = used[token - 1 : token] if token else np.zeros_like(used[:1])
        given, state = predictor.step(Step(of.token_ids[token : token + 1].astype(np.int64), previous), state)
        assert given.reuse is not None
        said.append((flat_map.flat(given.routing[0]), flat_map.flat(given.reuse[0])))
    return said


@pytest.mark.parametrize("cells", [1 << 23, 1])  # many sequences together; each alone
def test_decode_gives_every_token_what_was_predicted_of_it(cells: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foresight, "CHUNK_CELLS", cells)
    rows = [row("a", 3), row("b", 7), row("c", 0), row("d", 5)]
    predictor = Counting(spec_of(CAUSAL, "token"))
    found = list(forecasts_of(predictor, rows, CAUSAL, "decode"))
    assert (predictor.steps, predictor.largest) == ((7, 3) if cells > 1 else (15, 1))
    assert [forecast.step for forecast in found] == list(range(15))
    wanted = [item for sequence in rows for item in stepped(predictor, sequence)]
    for forecast, (demand, reuse) in zip(found, wanted, strict=True):
        np.testing.assert_allclose(forecast.demand, demand, 1e-6)
        np.testing.assert_allclose(forecast.reuse, reuse, 1e-6)  # type: ignore[arg-type]


def test_forecasts_stream() -> None:
    predictor = Counting(spec_of(CAUSAL, "token"), reuse=False)
    asked = forecasts_of(predictor, (row(str(index), 4) for index in range(10**9)), CAUSAL, "decode")
    assert next(asked).reuse is None
    assert predictor.steps == 4, "the first sequences alone were predicted"


def test_a_recorded_prompt_gets_the_forecast_of_its_first_token() -> None:
    rows = [row("a", 6, prompt_tokens=4), row("b", 3, prompt_tokens=0), row("c", 2)]
    predictor = Counting(spec_of(CAUSAL, "token"))
    found = list(forecasts_of(predictor, rows, CAUSAL, "recorded"))
    events = events_of(rows, CAUSAL, "recorded")
    assert [forecast.step for forecast in found] == sorted(set(events.steps.tolist())) == list(range(7))
    firsts = [stepped(predictor, rows[index])[token] for index, token in ((0, 0), (0, 4), (0, 5), (1, 0), (2, 0))]
    for forecast, (demand, _) in zip([found[index] for index in (0, 1, 2, 3, 6)], firsts, strict=True):
        np.testing.assert_allclose(forecast.demand, demand, 1e-6)


class Whole:
    """A batch predictor."""

    def __init__(self, spec: PredictorSpec) -> None:
        self.spec = spec

    def predict(self, token_ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
        """Give a tenth of the id for every expert."""
        return np.broadcast_to((0.1 * token_ids * mask)[..., None, None], (*token_ids.shape, *self.spec.shape)).astype(
            np.float32
        )


def test_whole_batches_get_the_union_of_their_tokens_and_other_stacks_nothing() -> None:
    rows = [
        row("a", 3, "encoder", BOTH),
        row("a", 2, "decoder", BOTH),
        row("b", 5, "encoder", BOTH),
        row("b", 2, "decoder", BOTH),
    ]
    found = list(forecasts_of(Whole(spec_of(BOTH, "batch", "encoder")), rows, BOTH, "prefill"))
    assert [forecast.step for forecast in found] == [0, 2]
    for forecast, of in zip(found, (rows[0], rows[2]), strict=True):
        assert of.token_ids is not None
        any_token = union(0.1 * of.token_ids, 1)
        np.testing.assert_allclose(forecast.demand, [any_token] * 3 + [0] * 4, 1e-6)
        assert forecast.reuse is None


def test_a_predictor_of_the_layer_horizon_is_asked_before_each_token() -> None:
    rows = [row("a", 6), row("b", 4)]
    predictor: Any = LayerPair(spec_of(CAUSAL, "layer")).fit(rows)
    found = list(forecasts_of(predictor, rows, CAUSAL, "decode"))
    np.testing.assert_allclose(found[3].demand, FlatMap(predictor.spec, CAUSAL).flat(predictor.popularity_), 1e-6)
    assert len(found) == 10


@pytest.mark.parametrize(
    ("horizon", "stack", "how"),
    [("token", "causal", "prefill"), ("layer", "causal", "prefill")]
    + [("batch", "causal", how) for how in ("decode", "recorded")]
    + [("batch", "encoder", "decode")],
)
def test_readings_that_cannot_be_foreseen_are_refused(horizon: str, stack: str, how: Any) -> None:
    topology = CAUSAL if stack == "causal" else BOTH
    with pytest.raises(SettingError, match=f"A predictor of the {horizon} horizon is replayed as .*, got {how}"):
        check_foresight(spec_of(topology, horizon, stack), how)
    check_foresight(spec_of(topology, horizon, stack), "prefill" if horizon == "batch" else "recorded")


def test_sequences_that_training_saw_are_left_out_with_all_their_rows() -> None:
    rows = [
        row("a", 3, "encoder", BOTH),
        row("a", 2, "decoder", BOTH),
        row("b", 4, "encoder", BOTH),
        row("b", 3, "decoder", BOTH),
        row("c", 2, "decoder", BOTH),
        row("c", 5, "decoder", BOTH),  # another sequence of that name
    ]
    spec = spec_of(BOTH, "token", "decoder")
    for seen, kept in (
        ([], [0, 1, 2, 3, 4, 5]),
        ([1], [2, 3, 4, 5]),
        ([3, 5], [0, 1, 4]),
        ([0], [0, 1, 2, 3, 4, 5]),  # a row of a stack that is not served
    ):
        found = Unseen(rows, spec, {fingerprint(rows[index]) for index in seen})
        assert list(found) == [rows[index] for index in kept]
        assert found.left_out == (0 if seen == [0] else len(seen))
