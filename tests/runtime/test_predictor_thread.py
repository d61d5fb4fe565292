"""The predictor's thread: inputs in order, failures kept, backlog bounded, every end joined."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from foregate.collect.errors import ClosedError
from foregate.collect.topology import MoeTopology
from foregate.predictors.base import Prediction, PredictorSpec, Step
from foregate.runtime import predictor_thread as module
from foregate.runtime.clock import ManualClock
from foregate.runtime.predictor_thread import BatchInput, PredictorThread, TokenInput

TOPOLOGY = MoeTopology.uniform(2, 4, 2)
PATIENCE = 20.0  # seconds until a test gives up; nothing waits this long when all is well


def spec(horizon: str) -> PredictorSpec:
    return PredictorSpec(family="fake", horizon=horizon, topology=TOPOLOGY, stack="causal", vocab_size=99)  # type: ignore[arg-type]


class Fake:
    """A token predictor that says that token i uses expert i % 4 of each layer, now half as surely as later.

    It notes what it was given.
    """

    spec = spec("token")

    def __init__(self, before: Callable[[int], None] = lambda call: None) -> None:
        self.before = before
        self.starts: list[int] = []
        self.steps: list[tuple[list[int], np.ndarray, int]] = []

    def start(self, batch: int) -> int:
        self.starts.append(batch)
        return 0

    def step(self, step: Step, state: object) -> tuple[Prediction, int]:
        assert isinstance(state, int)
        self.steps.append((step.token_ids.tolist(), step.previous.copy(), state))
        self.before(len(self.steps))
        probs_BLE = np.zeros((len(step.token_ids), *self.spec.shape), np.float32)
        for row, token in enumerate(step.token_ids):
            probs_BLE[row, :, token % 4] = 0.5
        return Prediction(probs_BLE, 2 * probs_BLE), state + 1


class Gate:
    """Holds a predictor at one of its calls until the test opens it."""

    def __init__(self, call: int) -> None:
        self.call, self.reached, self.opened = call, threading.Event(), threading.Event()

    def __call__(self, call: int) -> None:
        if call == self.call:
            self.reached.set()
            assert self.opened.wait(PATIENCE)


def fresh(step: int, *tokens: int) -> TokenInput:
    return TokenInput(step, np.array(tokens)[:, None], None)


def following(step: int, tokens: list[list[int]], *layers: list[list[int]]) -> TokenInput:
    return TokenInput(step, np.array(tokens), [np.array(layer) for layer in layers])


@pytest.fixture
def fake() -> Fake:
    return Fake()


@pytest.fixture
def thread(fake: Fake) -> Iterator[PredictorThread]:
    with PredictorThread(fake, TOPOLOGY) as running:
        yield running


def test_a_forecast_is_flat_and_carries_its_step(thread: PredictorThread) -> None:
    assert thread.latest() is None
    thread.submit(fresh(7, 2))
    thread.drain()
    forecast = thread.latest()
    assert forecast is not None
    assert forecast.step == 7
    assert forecast.demand.tolist() == [0, 0, 0.5, 0, 0, 0, 0.5, 0]


def test_rows_of_a_batch_are_combined(thread: PredictorThread) -> None:
    thread.submit(fresh(1, 2, 6, 3))
    thread.drain()
    forecast = thread.latest()
    assert forecast is not None
    assert forecast.demand[:4].tolist() == [0, 0, 0.75, 0.5]
    assert forecast.reuse is not None
    assert forecast.reuse[:4].tolist() == [0, 0, 2, 1], "the sum over sequences"


def test_tokens_go_in_one_by_one_with_the_routing_before_them(fake: Fake, thread: PredictorThread) -> None:
    thread.submit(fresh(1, 5))
    thread.submit(following(2, [[6, 7, 8]], [[0, 1], [1, 2], [2, -1]], [[3, 0], [3, 1], [-1, -1]]))
    thread.drain()
    assert fake.starts == [1]
    assert [(tokens, state) for tokens, _, state in fake.steps] == [([5], 0), ([6], 1), ([7], 2), ([8], 3)]
    previous = [step[1][0].tolist() for step in fake.steps]
    assert previous == [
        [[0, 0, 0, 0], [0, 0, 0, 0]],
        [[1, 1, 0, 0], [1, 0, 0, 1]],
        [[0, 1, 1, 0], [0, 1, 0, 1]],
        [[0, 0, 1, 0], [0, 0, 0, 0]],
    ]
    forecast = thread.latest()
    assert forecast is not None
    assert forecast.step == 2
    assert forecast.demand[0] == 0.5  # of token 8, the last


def test_a_new_sequence_and_a_new_batch_start_afresh(fake: Fake, thread: PredictorThread) -> None:
    thread.submit(fresh(1, 5))
    thread.submit(fresh(2, 6))
    thread.submit(following(3, [[1], [2]], [[0, 1], [1, 2]], [[0, 1], [1, 2]]))
    thread.drain()
    assert fake.starts == [1, 1, 2]
    assert [state for _, _, state in fake.steps] == [0, 0, 0]


def test_a_batch_predictor_sees_the_batch_and_padding_says_nothing() -> None:
    class Batch:
        spec = spec("batch")

        def predict(self, token_ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
            return np.full((*token_ids.shape, 2, 4), 0.5, np.float32)

    with PredictorThread(Batch(), TOPOLOGY) as thread:
        mask = np.array([[True, True], [True, False]])
        thread.submit(BatchInput(3, np.array([[1, 2], [3, 0]]), mask))
        thread.drain()
        forecast = thread.latest()
    assert forecast is not None
    assert forecast.demand.tolist() == [0.875] * 8


class _Fatal(BaseException):
    """What native code raises when it panics: no Exception."""


@pytest.mark.parametrize("error", [ValueError("no such row"), _Fatal("no such row")])
def test_a_failing_predictor_ends_its_thread_and_nothing_else(
    error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(call: int) -> None:
        if call == 2:
            raise error

    with caplog.at_level(logging.WARNING), PredictorThread(Fake(fail), TOPOLOGY) as thread:
        thread.submit(fresh(1, 2))
        thread.drain()
        assert thread.error is None
        thread.submit(fresh(2, 2))
        thread.drain()
        assert thread.error is error
        assert thread.latest() is None
        thread.submit(fresh(3, 2))  # taken and forgotten
        thread.drain()
    assert thread.calls == 1
    assert caplog.messages == ["predictor fake failed and is switched off: no such row"]


def test_a_slow_predictor_never_blocks_its_caller() -> None:
    gate = Gate(call=2)
    with PredictorThread(Fake(gate), TOPOLOGY) as thread:
        thread.submit(fresh(1, 1))
        thread.drain()
        thread.submit(fresh(2, 2))
        assert gate.reached.wait(PATIENCE)
        thread.submit(fresh(3, 3))
        forecast = thread.latest()
        assert forecast is not None
        assert forecast.step == 1, "the newest there is, of an older step"
        gate.opened.set()
        thread.drain()
        forecast = thread.latest()
        assert forecast is not None
        assert forecast.step == 3


def test_the_backlog_is_bounded_and_the_oldest_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BACKLOG_TOKENS", 4)
    gate = Gate(call=1)
    fake = Fake(gate)
    with PredictorThread(fake, TOPOLOGY) as thread:
        thread.submit(fresh(1, 10))
        assert gate.reached.wait(PATIENCE)
        for step in range(2, 8):
            thread.submit(fresh(step, 10 * step))
        gate.opened.set()
        thread.drain()
        assert thread.dropped == 3  # the one being worked on was counted out too
        forecast = thread.latest()
        assert forecast is not None
        assert forecast.step == 7
    assert [tokens for tokens, _, _ in fake.steps] == [[10], [40], [50], [60], [70]]


def test_one_input_larger_than_the_backlog_is_still_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BACKLOG_TOKENS", 2)
    fake = Fake()
    with PredictorThread(fake, TOPOLOGY) as thread:
        thread.submit(fresh(1, 1, 2, 3, 4))
        thread.drain()
        assert thread.dropped == 0
        assert thread.latest() is not None


def test_close_joins_is_idempotent_and_refuses_inputs(fake: Fake) -> None:
    thread = PredictorThread(fake, TOPOLOGY)
    before = threading.active_count()
    thread.close()
    thread.close()
    assert threading.active_count() == before - 1
    with pytest.raises(ClosedError, match="load the model again"):
        thread.submit(fresh(1, 1))
    thread.drain()


def test_close_waits_for_the_call_under_way_and_drops_the_rest() -> None:
    gate = Gate(call=1)
    fake = Fake(gate)
    thread = PredictorThread(fake, TOPOLOGY)
    thread.submit(fresh(1, 1))
    thread.submit(fresh(2, 2))
    assert gate.reached.wait(PATIENCE)
    closer = threading.Thread(target=thread.close)
    closer.start()
    thread.drain()  # does not wait for what will never be done
    gate.opened.set()
    closer.join(PATIENCE)
    assert not closer.is_alive()
    assert len(fake.steps) == 1


def test_calls_and_seconds_are_counted() -> None:
    clock = ManualClock()
    with PredictorThread(Fake(lambda call: clock.advance(0.25)), TOPOLOGY, clock) as thread:
        thread.submit(fresh(1, 1))
        thread.submit(fresh(2, 1))
        thread.drain()
        assert thread.calls == 2
        assert thread.busy_s == 0.5
