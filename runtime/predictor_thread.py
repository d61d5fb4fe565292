"""The predictor's own thread. Knows predictors and forecasts; knows nothing of caches or transfers.

Threads: the compute thread calls `submit`, `latest` and `close`; one worker runs the predictor and publishes.
Guarantees: `submit` never blocks and `latest` never waits; inputs are processed in order; a predictor that fails ends
its thread, keeps the error for `error`, and the model runs on without forecasts. One lock, held for O(1) work and never
while the predictor runs.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from typing import NamedTuple

import numpy as np

from ..collect.errors import ClosedError
from ..collect.topology import MoeTopology
from ..predictors.base import BatchPredictor, Prediction, Predictor, Step, TokenPredictor
from .clock import Clock, SystemClock
from .forecast import FlatMap, Forecast, union

log = logging.getLogger(__name__)

BACKLOG_TOKENS = 8192  # inputs that may wait; older ones are dropped, which costs accuracy and never correctness


class TokenInput(NamedTuple):
    """Tokens of the token horizon, oldest first; only the last one's forecast is published."""

    step: int
    token_ids: np.ndarray
    """int64 [B, T]"""
    routing: list[np.ndarray] | None
    """Per served layer int [B * T, k]: experts of the token before each; None where a new sequence starts (T = 1)."""


class BatchInput(NamedTuple):
    """A whole batch of the batch horizon."""

    step: int
    token_ids: np.ndarray
    """int64 [B, T]"""
    mask: np.ndarray
    """bool [B, T], False on padding."""


class PredictorThread:
    """Run a predictor beside inference; use as a context manager or call `close`."""

    def __init__(self, predictor: Predictor, topology: MoeTopology, clock: Clock | None = None) -> None:
        self.spec = predictor.spec
        self.map = FlatMap(predictor.spec, topology)
        self._predictor = predictor
        self._clock = clock or SystemClock()
        self._state: object | None = None
        self._batch = -1
        self._inputs: deque[TokenInput | BatchInput] = deque()
        self._waiting = 0  # tokens in the queue
        self._latest: Forecast | None = None
        self._error: BaseException | None = None
        self._closed = False
        self.calls = 0
        self.busy_s = 0.0
        self.dropped = 0
        self._changed = threading.Condition()
        self._worker = threading.Thread(target=self._run, name="foregate-predictor", daemon=True)
        self._worker.start()

    def submit(self, item: TokenInput | BatchInput) -> None:
        """Hand over inputs; never blocks.

        Raises:
            ClosedError: after `close`.
        """
        with self._changed:
            if self._closed:
                raise ClosedError("The predictor thread is closed; load the model again to predict.")
            if self._error is not None:
                return
            self._inputs.append(item)
            self._waiting += item.token_ids.size
            while self._waiting > BACKLOG_TOKENS and len(self._inputs) > 1:
                self._waiting -= self._inputs.popleft().token_ids.size
                self.dropped += 1
            self._changed.notify_all()

    def latest(self) -> Forecast | None:
        """Give the newest forecast, whatever step it was made for."""
        return self._latest

    @property
    def error(self) -> BaseException | None:
        """Give what ended the thread, or None while it is well."""
        return self._error

    def drain(self) -> None:
        """Wait until every input so far is processed or the predictor has failed."""
        with self._changed:
            self._changed.wait_for(lambda: not self._inputs or self._closed or self._error is not None)

    def close(self) -> None:
        """Stop and join the thread; a second call does nothing."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._worker.join()

    def __enter__(self) -> PredictorThread:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._inputs or self._closed)
                if self._closed:
                    return
                item = self._inputs[0]  # stays in the queue while it is worked on, so that `drain` waits for it
            try:
                start = self._clock.now()
                forecast = self._process(item)
                self.busy_s += self._clock.now() - start
                self.calls += 1
            except BaseException as error:  # a predictor is a hint: it may end, inference may not
                log.warning("predictor %s failed and is switched off: %s", self.spec.family, error)
                with self._changed:
                    self._error = error
                    self._latest = None
                    self._inputs.clear()
                    self._changed.notify_all()
                return
            with self._changed:
                self._latest = forecast
                if self._inputs and self._inputs[0] is item:
                    self._inputs.popleft()
                    self._waiting -= item.token_ids.size
                self._changed.notify_all()

    def _process(self, item: TokenInput | BatchInput) -> Forecast:
        if isinstance(item, BatchInput):
            assert isinstance(self._predictor, BatchPredictor)
            probs_BTLE = self._predictor.predict(item.token_ids, item.mask)
            probs_BTLE = probs_BTLE * item.mask[:, :, None, None]
            return Forecast(item.step, self.map.flat(union(probs_BTLE, 2)))
        assert isinstance(self._predictor, TokenPredictor)
        batch, num_tokens = item.token_ids.shape
        shape = self.spec.shape
        if item.routing is None or batch != self._batch:
            self._state, self._batch = self._predictor.start(batch), batch
        if item.routing is None:
            previous_BTLE = np.zeros((batch, num_tokens, *shape), np.float32)
        else:
            previous_BTLE = self.map.multi_hot(item.routing, shape).reshape(batch, num_tokens, *shape)
        given = Prediction(np.zeros((batch, *shape), np.float32))
        for token in range(num_tokens):
            step = Step(item.token_ids[:, token], previous_BTLE[:, token])
            given, self._state = self._predictor.step(step, self._state)
        reuse = None if given.reuse is None else self.map.flat(given.reuse.sum(0))
        return Forecast(item.step, self.map.flat(union(given.routing, 1)), reuse)
