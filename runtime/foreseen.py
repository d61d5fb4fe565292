"""Replay of `predicted`: events together with the forecasts of their forwards, at several capacities in one pass.

Forecasts come as a stream that is consumed block by block, so that a predictor runs once however many capacities are
replayed, and no more forecasts are in memory than a block. Knows flat arrays; no predictors.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Protocol

import numpy as np

from ..collect.errors import SettingError
from ..collect.topology import MoeTopology
from .cache import ExpertCache
from .compiled import foreseen_replay
from .events import Events
from .forecast import Forecast
from .policies.predicted import Predicted

BLOCK = 256  # forecasts


class ForeseenReplay(Protocol):
    """A replay of one capacity that is under way."""

    misses: np.ndarray
    """int32 [N], misses of each event so far."""

    def advance(self, forecasts: Sequence[Forecast], last: int) -> None:
        """Replay the events up to `last`, given the forecasts of their forwards; other forwards have none."""
        ...


class PythonReplay:
    """Replay the policy's own class, as the engine runs it."""

    def __init__(self, events: Events, topology: MoeTopology, capacity: int) -> None:
        self.misses = np.zeros(len(events), np.int32)
        self._policy = Predicted(topology)
        self._cache = ExpertCache(capacity, self._policy)
        self._events, self._steps, self._done = iter(events), events.steps, 0

    def advance(self, forecasts: Sequence[Forecast], last: int) -> None:
        """Replay the events up to `last`."""
        by_step = {forecast.step: forecast for forecast in forecasts}
        steps = self._steps[self._done : last].tolist()
        foresee, serve = self._policy.foresee, self._cache.event
        counts = []
        for event, step in zip(islice(self._events, len(steps)), steps, strict=True):
            foresee(by_step.get(step), acting=True)
            counts.append(len(serve(event.needed, one_token=event.one_token).misses))
        self.misses[self._done : last] = counts
        self._done = last


def foreseen_misses(
    events: Events,
    capacities: Iterable[int],
    topology: MoeTopology,
    forecasts: Iterable[Forecast],
    *,
    quick: bool = True,
) -> dict[int, np.ndarray]:
    """Replay `predicted` at several capacities, cold at the start, and give the misses of each event.

    Args:
        capacities: experts that the cache holds.
        forecasts: by ascending step, at most one for each; a forward without one has none in time.
        quick: compiled where numba can be used.

    Returns:
        int32 [N] by capacity.

    Raises:
        SettingError: if a capacity is not positive, or steps do not ascend.
    """
    compiled = foreseen_replay() if quick else None
    replays: dict[int, ForeseenReplay] = {}
    for capacity in capacities:
        if capacity < 1:
            raise SettingError(f"capacity must be at least 1 expert, got {capacity}.")
        replays[capacity] = (compiled or PythonReplay)(events, topology, capacity)
    stream = _ascending(forecasts)
    while block := list(islice(stream, BLOCK)):
        last = int(np.searchsorted(events.steps, block[-1].step, side="right"))
        for replay in replays.values():
            replay.advance(block, last)
    for replay in replays.values():
        replay.advance([], len(events))
    return {capacity: replay.misses for capacity, replay in replays.items()}


def _ascending(forecasts: Iterable[Forecast]) -> Iterator[Forecast]:
    before = -1
    for forecast in forecasts:
        if forecast.step <= before:
            raise SettingError(
                f"Forecasts must come by ascending step, got one of step {forecast.step} after one of step {before}; "
                "make them from the rows that the events are made of."
            )
        before = forecast.step
        yield forecast
