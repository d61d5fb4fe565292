"""Steps: what the predictor is handed when, and how its forecasts are counted."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from foregate.collect import tiny_models
from foregate.collect.architectures import topology_of
from foregate.collect.topology import MoeLayer, MoeTopology, Stack
from foregate.predictors.base import Prediction, PredictorSpec, Step
from foregate.runtime.counters import Counters
from foregate.runtime.predictor_thread import BatchInput, PredictorThread, TokenInput
from foregate.runtime.steps import StepTracker
from hypothesis import given, settings
from hypothesis import strategies as st

TOPOLOGY = MoeTopology.uniform(2, 4, 2)
PAIRED = MoeTopology(
    layers=(
        MoeLayer(stack="encoder", block=1, num_experts=4, top_k=1),
        MoeLayer(stack="encoder", block=3, num_experts=4, top_k=1),
        MoeLayer(stack="decoder", block=1, num_experts=4, top_k=1),
    )
)


class Recording:
    """A token predictor that notes every (ids, previous routing) since the last start."""

    def __init__(self, topology: MoeTopology = TOPOLOGY) -> None:
        self.spec = PredictorSpec(
            family="recording", horizon="token", topology=topology, stack=topology.stacks[-1], vocab_size=999
        )
        self.pairs: list[tuple[list[int], list]] = []
        self.starts = 0

    def start(self, batch: int) -> int:
        self.starts += 1
        self.pairs = []
        return batch

    def step(self, step: Step, state: object) -> tuple[Prediction, object]:
        self.pairs.append((step.token_ids.tolist(), step.previous.tolist()))
        probs_BLE = np.zeros((len(step.token_ids), *self.spec.shape), np.float32)
        probs_BLE[:, :, :2] = 0.9
        return Prediction(probs_BLE), state


@pytest.fixture
def recording() -> Recording:
    return Recording()


@pytest.fixture
def thread(recording: Recording) -> Iterator[PredictorThread]:
    with PredictorThread(recording, TOPOLOGY) as running:
        yield running


def tracker(thread: PredictorThread | None, **settings: Callable[[], bool]) -> StepTracker:
    return StepTracker(TOPOLOGY, Counters(TOPOLOGY.num_layers), thread, **settings)


def forward(steps: StepTracker, ids: list[list[int]], *, fresh: bool = False, route: int = 0) -> None:
    """Go through one step in which every token uses experts `route` and `route + 1` of every layer."""
    ids_BT = np.array(ids)
    steps.begin("causal", ids_BT, None, fresh)
    for layer in range(TOPOLOGY.num_layers):
        steps.routed(layer, np.tile([route, route + 1], (ids_BT.size, 1)))


@given(
    chunks=st.lists(st.integers(1, 5), min_size=1, max_size=6),
    batch=st.integers(1, 3),
    seed=st.integers(0, 999),
    again=st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_steps_hand_over_what_one_pass_over_the_sequence_has(
    chunks: list[int], batch: int, seed: int, again: bool
) -> None:
    random = np.random.default_rng(seed)
    length = sum(chunks)
    ids_BT = random.integers(0, 99, (batch, length))
    routing_LBTK = np.stack([np.stack([random.permutation(4)[:2] for _ in range(batch * length)]) for _ in range(2)])
    routing_LBTK = routing_LBTK.reshape(2, batch, length, 2)
    recording = Recording()
    with PredictorThread(recording, TOPOLOGY) as thread:
        steps = tracker(thread)
        if again:  # an earlier sequence leaves nothing behind
            forward(steps, [[1, 2, 3]] * batch, fresh=True)
        start = 0
        for chunk in chunks:
            part = slice(start, start + chunk)
            steps.begin("causal", ids_BT[:, part], None, fresh=start == 0)
            for layer in range(2):
                steps.routed(layer, routing_LBTK[layer, :, part].reshape(-1, 2))
            start += chunk
        thread.drain()
    known = length - chunks[-1] + 1  # all before the last step, and its first token
    used_BTLE = np.zeros((batch, length, 2, 4))
    for layer, row, token in np.ndindex(2, batch, length):
        used_BTLE[row, token, layer, routing_LBTK[layer, row, token]] = 1
    expected = [
        (ids_BT[:, token].tolist(), (used_BTLE[:, token - 1] if token else np.zeros((batch, 2, 4))).tolist())
        for token in range(known)
    ]
    assert recording.pairs == expected


def test_another_batch_starts_afresh(recording: Recording, thread: PredictorThread) -> None:
    steps = tracker(thread)
    forward(steps, [[5, 6]], fresh=True)
    forward(steps, [[7], [8]])
    thread.drain()
    assert recording.starts == 2
    assert [ids for ids, _ in recording.pairs] == [[7, 8]]


def test_a_step_that_was_not_finished_is_not_gone_on_from(recording: Recording, thread: PredictorThread) -> None:
    steps = tracker(thread)
    forward(steps, [[5, 6]], fresh=True)
    steps.begin("causal", np.array([[7]]), None, False)
    steps.routed(0, np.array([[0, 1]]))  # and layer 1 is never reached
    forward(steps, [[7]])
    thread.drain()
    assert recording.starts == 2
    assert [ids for ids, _ in recording.pairs] == [[7]]


def test_a_step_from_embeddings_has_nothing_to_predict_from(recording: Recording, thread: PredictorThread) -> None:
    steps = tracker(thread)
    forward(steps, [[5]], fresh=True)
    steps.begin("causal", None, None, False)
    assert steps.routed(1, np.array([[0, 1]])) is None
    forward(steps, [[6]])
    thread.drain()
    assert recording.starts == 2
    assert steps.counters.steps == 3
    assert steps.counters.forecasts + steps.counters.late_forecasts == 2


def test_a_forecast_in_time_is_given_and_scored(thread: PredictorThread) -> None:
    steps = tracker(thread)
    steps.begin("causal", np.array([[5]]), None, True)
    thread.drain()
    forecast = steps.routed(0, np.array([[0, 3]]))
    assert forecast is not None
    assert forecast.demand.tolist() == pytest.approx([0.9, 0.9, 0, 0] * 2)
    steps.routed(1, np.array([[1, -1]]))
    counters = steps.counters
    assert (counters.forecasts, counters.late_forecasts) == (1, 0)
    assert counters.named == 3
    assert counters.named_right in (1, 2)  # 0 of (0, 3); of layer 1's equal pair the one named may be either


def test_a_late_forecast_is_counted_and_not_given() -> None:
    opened = threading.Event()

    class Slow(Recording):
        def step(self, step: Step, state: object) -> tuple[Prediction, object]:
            assert opened.wait(20)
            return super().step(step, state)

    with PredictorThread(Slow(), TOPOLOGY) as thread:
        steps = tracker(thread)
        steps.begin("causal", np.array([[5]]), None, True)
        assert steps.routed(0, np.array([[0, 1]])) is None
        assert steps.routed(1, np.array([[0, 1]])) is None
        opened.set()
        thread.drain()
        steps.begin("causal", np.array([[6]]), None, False)
        thread.drain()
        assert steps.routed(0, np.array([[0, 1]])) is not None
        assert steps.routed(1, np.array([[0, 1]])) is not None
    assert (steps.counters.forecasts, steps.counters.late_forecasts) == (1, 1)


def test_observing_scores_without_giving(thread: PredictorThread) -> None:
    steps = tracker(thread)
    steps.acting = False
    steps.begin("causal", np.array([[5]]), None, True)
    thread.drain()
    assert steps.routed(0, np.array([[0, 1]])) is None
    assert (steps.counters.named, steps.counters.named_right) == (2, 2)


def test_nothing_is_asked_while_it_does_not_pay(recording: Recording, thread: PredictorThread) -> None:
    paying = True
    steps = tracker(thread, wanted=lambda: paying)
    forward(steps, [[5]], fresh=True)
    paying = False
    forward(steps, [[6]])
    forward(steps, [[7]])
    paying = True
    forward(steps, [[8]])
    thread.drain()
    assert recording.starts == 2
    assert [ids for ids, _ in recording.pairs] == [[8]]
    assert steps.counters.forecasts + steps.counters.late_forecasts == 2
    assert steps.counters.steps == 4


def test_a_predictor_that_failed_is_asked_no_more() -> None:
    class Failing(Recording):
        def start(self, batch: int) -> int:
            raise RuntimeError("no")

    with PredictorThread(Failing(), TOPOLOGY) as thread:
        steps = tracker(thread)
        forward(steps, [[5]], fresh=True)
        thread.drain()
        before = steps.counters.late_forecasts
        forward(steps, [[6]])
        assert steps.counters.late_forecasts == before


def test_without_a_predictor_steps_and_tokens_are_counted() -> None:
    steps = tracker(None)
    forward(steps, [[5, 6], [7, 8]], fresh=True)
    forward(steps, [[9], [9]])
    assert (steps.counters.steps, steps.counters.tokens) == (2, 6)


def test_an_encoder_s_batch_is_predicted_at_once_and_its_decoder_is_not() -> None:
    class Batch:
        spec = PredictorSpec(family="batch", horizon="batch", topology=PAIRED, stack="encoder", vocab_size=99)

        def __init__(self) -> None:
            self.seen: list[tuple[list, list]] = []

        def predict(self, token_ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
            self.seen.append((token_ids.tolist(), mask.tolist()))
            return np.full((*token_ids.shape, 2, 4), 0.5, np.float32)

    predictor = Batch()
    with PredictorThread(predictor, PAIRED) as thread:
        steps = StepTracker(PAIRED, Counters(3), thread)
        steps.begin("encoder", np.array([[5, 6], [7, 0]]), np.array([[1, 1], [1, 0]]), True)
        thread.drain()
        forecast = steps.routed(0, np.array([[0], [1], [2], [-1]]))
        assert forecast is not None
        assert forecast.demand.tolist() == [0.875] * 8 + [0] * 4
        assert steps.routed(1, np.array([[0], [1], [2], [-1]])) is forecast
        steps.begin("decoder", np.array([[0], [0]]), None, True)
        assert steps.routed(2, np.array([[0], [1]])) is None
        steps.begin("encoder", np.array([[5, 6]]), None, True)
        thread.drain()
    assert predictor.seen == [([[5, 6], [7, 0]], [[True, True], [True, False]]), ([[5, 6]], [[True, True]])]
    assert steps.counters.tokens == 4 + 2
    assert (steps.counters.forecasts, steps.counters.late_forecasts) == (1, 0)


def test_threads_have_steps_of_their_own(thread: PredictorThread) -> None:
    steps = tracker(thread)
    steps.begin("causal", np.array([[5]]), None, True)
    thread.drain()
    other = threading.Thread(target=lambda: forward(steps, [[1, 2, 3]], fresh=True))
    other.start()
    other.join()
    thread.drain()
    assert steps.routed(0, np.array([[0, 1]])) is None, "the newest forecast is of the other thread's step"
    steps.routed(1, np.array([[0, 1]]))
    forward(steps, [[6]])
    thread.drain()
    assert thread.error is None
    assert (steps.counters.steps, steps.counters.tokens) == (3, 5)


class Spy:
    """In a predictor thread's place: keeps what is submitted."""

    error = None

    def __init__(self, spec: PredictorSpec) -> None:
        self.spec = spec
        self.items: list[TokenInput | BatchInput] = []

    def submit(self, item: TokenInput | BatchInput) -> None:
        self.items.append(item)

    def latest(self) -> None:
        return None


@pytest.mark.parametrize("name", ["qwen3_moe", "jamba", "switch_transformers"])
def test_hooks_see_each_step_and_can_be_taken_back(name: str) -> None:
    model = tiny_models.build(name)
    topology = topology_of(model)
    stack = topology.stacks[-1]
    spy = Spy(PredictorSpec(family="spy", horizon="token", topology=topology, stack=stack, vocab_size=999))
    steps = StepTracker(topology, Counters(topology.num_layers), spy)  # type: ignore[arg-type]
    hooks = [len(module._forward_pre_hooks) for module in model.modules()]
    freshness: list[bool] = []
    begin = steps.begin

    def noted(stack: Stack, ids: np.ndarray | None, mask: np.ndarray | None, fresh: bool) -> None:
        freshness.append(fresh)
        begin(stack, ids, mask, fresh)

    steps.begin = noted  # type: ignore[method-assign]
    steps.attach(model)
    ids = torch.arange(5, 11).reshape(2, 3)
    with torch.no_grad():
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=3, min_new_tokens=3, do_sample=False)
    decoder_only = stack == "causal"
    assert steps.counters.steps == (3 if decoder_only else 4)
    first = spy.items[0]
    assert first.token_ids.tolist() == ([[5], [8]] if decoder_only else [[0], [0]])
    assert freshness == [True] * (steps.counters.steps - 2) + [False, False]
    steps.detach()
    assert [len(module._forward_pre_hooks) for module in model.modules()] == hooks
