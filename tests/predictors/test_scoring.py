"""Scores of recorded sequences: the quick way through a sequence gives what steps give, and nan is refused."""

from __future__ import annotations

import numpy as np
import pytest
from foregate.collect.errors import BundleError
from foregate.collect.topology import MoeLayer, MoeTopology
from foregate.predictors import scoring
from foregate.predictors.base import Prediction, PredictorSpec, Step
from foregate.predictors.baselines import BASELINES
from foregate.predictors.rows import dense, ids_of, many_hot
from foregate.predictors.scoring import scores_of

TOPOLOGY = MoeTopology(
    layers=tuple(MoeLayer(stack="causal", block=i, num_experts=e, top_k=k) for i, (e, k) in enumerate([(8, 2), (5, 1)]))
)


def spec_of(family: str, horizon: str) -> PredictorSpec:
    return PredictorSpec(family=family, horizon=horizon, topology=TOPOLOGY, stack="causal", vocab_size=50)  # type: ignore[arg-type]


class Kept:
    """An entry of a state that is no array."""

    def __init__(self, entries: np.ndarray) -> None:
        self.entries = entries

    def array(self) -> np.ndarray:
        return self.entries


class Counting:
    """A layer predictor of named arrays: what it says tells the token's id, its history and the layers used."""

    reach = 1

    def __init__(self, *, flat_state: bool) -> None:
        self.spec, self.flat_state = spec_of("counting", "layer"), flat_state
        self.sizes: list[int] = []  # of each step's batch
        self.asked = 0  # layers

    def start(self, batch: int):
        return self.state(np.zeros((batch, 1), np.float32))

    def state(self, past: np.ndarray):
        return {"past": past, "kept": Kept(-past), "idle": Kept(past)} if self.flat_state else (past,)

    def past(self, state) -> np.ndarray:
        if not self.flat_state:
            return state[0]
        kept = state["kept"]  # its own kind after a step, an array where the states of several tokens are joined
        np.testing.assert_array_equal(kept.array() if isinstance(kept, Kept) else kept, -state["past"])
        return state["past"]

    def step(self, step: Step, state):
        self.sizes.append(len(step.token_ids))
        past = self.past(state) + 0.1 * step.token_ids[:, None] + step.previous.sum((1, 2))[:, None]
        routing = np.repeat(np.tanh(past)[:, :, None], 2, axis=1) * np.ones(8, np.float32)
        return Prediction(routing, routing / 2), self.state(past)

    def ahead(self, layer: int, used: np.ndarray, state):
        self.asked += 1
        assert "idle" not in state  # nobody asked for it
        past = self.past(state)
        out = np.zeros_like(used)
        if layer + 1 < used.shape[1]:
            out[:, layer + 1] = np.tanh(past + used[:, layer] @ np.arange(8, dtype=np.float32)[:, None] / 9)
        return out


@pytest.mark.parametrize("name", sorted(BASELINES))
@pytest.mark.parametrize("horizon", ["token", "layer"])
def test_a_free_predictor_says_at_once_what_its_steps_say(name, horizon, draw_rows):
    if horizon == "layer" and name != "layer_pair":
        pytest.skip("has no layers ahead")
    rows = draw_rows(TOPOLOGY, sequences=6)
    predictor = BASELINES[name](spec_of(name, horizon)).fit(rows[:3])
    if name == "oracle":
        predictor.fit(rows)
    at_once = {item.row.sequence: item for item in scores_of(predictor, rows)}
    for index, row in enumerate(rows):
        used = many_hot(dense(row, TOPOLOGY), 8)
        state, previous = predictor.start(len(rows)), np.zeros((len(rows), 2, 8), np.float32)
        for t, token_id in enumerate(ids_of(row)):
            given, state = predictor.step(Step(np.full(len(rows), token_id), previous), state)
            found = at_once[row.sequence].by_horizon
            np.testing.assert_allclose(found["token"][t], given.routing[index], atol=1e-6)
            if horizon == "layer":
                np.testing.assert_allclose(found["layer"][t, 1], predictor.ahead(0, used[t : t + 1], None)[0, 1])
                assert not found["layer"][t, 0].any()
            previous = np.repeat(used[t][None], len(rows), axis=0)


def test_sequences_that_ended_leave_the_batch_and_layers_are_asked_for_many_tokens_at_once(draw_rows, monkeypatch):
    monkeypatch.setattr(scoring, "JOINED_TOKENS", 30)
    rows = draw_rows(TOPOLOGY, sequences=10, tokens=(2, 40))
    quick, plain = Counting(flat_state=True), Counting(flat_state=False)
    ours = list(scores_of(quick, rows))
    theirs = list(scores_of(plain, rows, batch=1))
    assert [item.row.sequence for item in ours] == [item.row.sequence for item in theirs]
    for one, other in zip(ours, theirs, strict=True):
        for horizon in ("token", "layer"):
            np.testing.assert_allclose(one.by_horizon[horizon], other.by_horizon[horizon], atol=1e-6)
        np.testing.assert_allclose(one.reuse, other.reuse, atol=1e-6)
    assert quick.sizes[0] == 10 > quick.sizes[-1]
    tokens = sum(row.num_tokens for row in rows)
    assert plain.asked == tokens > 5 * quick.asked


def test_a_batch_fits_its_bytes(draw_rows, monkeypatch):
    rows = draw_rows(TOPOLOGY, sequences=4, tokens=(20, 21))
    monkeypatch.setattr(scoring, "BATCH_BYTES", 2 * 20 * 16 * 4)
    predictor = Counting(flat_state=True)
    assert len(list(scores_of(predictor, rows))) == 4
    assert set(predictor.sizes) == {2}


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_scores_that_are_no_numbers_are_refused(value, draw_rows, monkeypatch):
    predictor = Counting(flat_state=True)
    step = predictor.step

    def broken(given, state):
        said, state = step(given, state)
        said.routing[-1, 1, 3] = value if len(predictor.sizes) == 4 else 0
        return said, state

    monkeypatch.setattr(predictor, "step", broken)
    with pytest.raises(BundleError, match=f"counting gives the score {value} .token 3 of sequence .* export another"):
        list(scores_of(predictor, draw_rows(TOPOLOGY, sequences=2, tokens=(9, 10))))
