"""Compiled replay of `predicted`, block by block of forecasts. Knows flat arrays only."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...collect.topology import MoeTopology
from ..events import Events
from ..forecast import Forecast
from ..policies.predicted import DECAY, SURPRISE
from .jit import compiled
from .scores import least

HELD, RUN, AVERAGING, TOLD = range(4)  # places of the state that one block hands to the next


class CompiledReplay:
    """Replay one capacity; see `foreseen.ForeseenReplay`."""

    def __init__(self, events: Events, topology: MoeTopology, capacity: int) -> None:
        self.misses = np.zeros(len(events), np.int32)
        self._events, self._capacity, self._done = events, capacity, 0
        self._flat = (events.experts, events.starts, events.tokens == 1, events.layers)
        self._offsets = np.array(topology.offsets, np.int64)
        experts = topology.num_experts
        self._used = np.full(experts, -1, np.int64)  # last event of each resident expert, -1 where absent
        self._reuse, self._value = np.zeros(experts, np.float32), np.zeros(experts, np.float32)
        self._state = np.array([0, 0, 1, 0], np.int64)

    def advance(self, forecasts: Sequence[Forecast], last: int) -> None:
        """Replay the events up to `last`."""
        events, first, experts = self._events, self._done, len(self._used)
        steps = np.array([forecast.step for forecast in forecasts], np.int64)
        demand = np.zeros((len(steps), experts), np.float32)
        told = np.array([forecast.reuse is not None for forecast in forecasts], bool)
        reuse = np.zeros((len(steps) if told.any() else 0, experts), np.float32)
        for row, forecast in enumerate(forecasts):
            demand[row] = forecast.demand
            if forecast.reuse is not None:
                reuse[row] = forecast.reuse
        rows = np.full(last - first, -1, np.int64)
        if len(steps):
            places = np.searchsorted(steps, events.steps[first:last]).clip(max=len(steps) - 1)
            rows = np.where(steps[places] == events.steps[first:last], places, -1)
        own = (self._used, self._reuse, self._value, self._state, self.misses)
        shares = [np.float32(share) for share in (DECAY, 1.0 - DECAY, SURPRISE)]
        _advance(*self._flat, self._offsets, rows, demand, reuse, told, *shares, self._capacity, first, last, *own)
        self._done = last


@compiled
def _advance(
    experts, starts, single, layers, offsets, rows, demand, reuse, told, decay, gain, surprise, capacity,
    first, last, used, now, value, state, misses,
):  # fmt: skip
    for event in range(first, last):
        row = rows[event - first]
        if row >= 0 and (event == first or rows[event - first - 1] != row):  # no forecast is of two blocks
            if told[row]:
                value[:] = demand[row] + reuse[row]
                now[:] = reuse[row] - surprise * demand[row]
            else:
                value[:] = demand[row] + now
            state[AVERAGING] = 0 if told[row] else 1
            state[RUN] = 0
            state[TOLD] = 1
        elif row < 0 and state[TOLD]:
            state[AVERAGING] = 1
            value[:] = now
            state[RUN] = 0
            state[TOLD] = 0
        begin, end = starts[event], starts[event + 1]
        low, high = offsets[layers[event]], offsets[layers[event] + 1]
        if state[AVERAGING]:
            now[low:high] *= decay
        for index in range(begin, end):
            now[experts[index]] += gain if state[AVERAGING] else surprise
        run = min(state[RUN], low)
        value[run:high] = now[run:high]
        state[RUN] = max(state[RUN], high)
        for index in range(begin, end):
            expert = experts[index]
            if used[expert] < 0:
                misses[event] += 1
                state[HELD] += 1
            used[expert] = event
        before = event if single[event] and end - begin <= capacity else event + 1  # who was used later is protected
        while state[HELD] > capacity:
            used[least(value, used, before)] = -1
            state[HELD] -= 1
