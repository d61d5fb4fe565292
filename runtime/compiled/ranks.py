"""Compiled replay of policies whose ranks change only on use: Belady, LFU, a static hot set. Knows flat arrays only.

Resident experts stand in one heap of at most all experts, so that memory does not grow with the trace.
"""

from __future__ import annotations

import numpy as np

from ..events import Events
from ..policies.registry import PolicySetting
from ..policies.static import hot_places
from .jit import compiled

NEVER = np.int64(1) << 60  # an event number beyond every trace
NOTHING = np.zeros(0, np.int64)


def belady(events: Events, setting: PolicySetting) -> np.ndarray:
    """Give the misses of each event under Belady's optimum, int32 [N]."""
    after = _next_events(events.experts, events.starts, setting.topology.num_experts)
    return _replay(events, setting, after, NOTHING)


def lfu(events: Events, setting: PolicySetting) -> np.ndarray:
    """Give the misses of each event under LFU, int32 [N]."""
    return _replay(events, setting, NOTHING, NOTHING)


def static(events: Events, setting: PolicySetting) -> np.ndarray:
    """Give the misses of each event with a static hot set, int32 [N]."""
    assert setting.load is not None
    return _replay(events, setting, NOTHING, hot_places(setting.load, setting.topology, setting.capacity))


def _replay(events: Events, setting: PolicySetting, after: np.ndarray, places: np.ndarray) -> np.ndarray:
    experts = setting.topology.num_experts
    return _ranked(events.experts, events.starts, events.tokens == 1, setting.capacity, experts, after, places)


@compiled
def _next_events(experts, starts, num_experts):
    """Give for every access the next event that uses its expert, int64 [A]."""
    after = np.empty(len(experts), np.int64)
    coming = np.full(num_experts, NEVER, np.int64)
    for event in range(len(starts) - 2, -1, -1):
        for index in range(starts[event], starts[event + 1]):
            after[index] = coming[experts[index]]
            coming[experts[index]] = event
    return after


@compiled
def _settle(heap, place, rank, size, at):
    """Move the expert at a place of the heap up or down to where it belongs; ties go to the smallest expert."""
    expert = heap[at]
    while at > 0:
        parent = (at - 1) >> 1
        other = heap[parent]
        if rank[other] < rank[expert] or (rank[other] == rank[expert] and other < expert):
            break
        heap[at] = other
        place[other] = at
        at = parent
    while True:
        child = 2 * at + 1
        if child >= size:
            break
        if child + 1 < size:
            one, two = heap[child], heap[child + 1]
            if rank[two] < rank[one] or (rank[two] == rank[one] and two < one):
                child += 1
        other = heap[child]
        if rank[expert] < rank[other] or (rank[expert] == rank[other] and expert < other):
            break
        heap[at] = other
        place[other] = at
        at = child
    heap[at] = expert
    place[expert] = at


@compiled
def _ranked(experts, starts, single, capacity, num_experts, after, places):
    """Evict the smallest rank: minus the next event where `after` is given, (place, event) where `places` is, else
    (uses since it entered, event)."""
    heap = np.empty(num_experts, np.int32)  # resident experts, smallest rank first
    place = np.full(num_experts, -1, np.int32)  # of each resident expert in the heap
    rank = np.zeros(num_experts, np.int64)
    uses = np.zeros(num_experts, np.int64)
    used = np.full(num_experts, -1, np.int64)  # last event
    aside = np.empty(num_experts, np.int32)
    size = 0
    misses = np.zeros(len(single), np.int32)
    for event in range(len(single)):
        first, last = starts[event], starts[event + 1]
        for index in range(first, last):
            expert = experts[index]
            if len(after) > 0:
                rank[expert] = -after[index]
            elif len(places) > 0:
                rank[expert] = (places[expert] << 32) | event
            else:
                uses[expert] += 1
                rank[expert] = (uses[expert] << 32) | event
            used[expert] = event
            if place[expert] < 0:
                misses[event] += 1
                heap[size] = expert
                place[expert] = size
                size += 1
            _settle(heap, place, rank, size, place[expert])
        protects = single[event] and last - first <= capacity
        kept = 0
        while size + kept > capacity:
            expert = heap[0]
            place[expert] = -1
            size -= 1
            if size > 0:
                heap[0] = heap[size]
                place[heap[0]] = 0
                _settle(heap, place, rank, size, 0)
            if protects and used[expert] == event:
                aside[kept] = expert
                kept += 1
            else:
                uses[expert] = 0
        for index in range(kept):
            expert = aside[index]
            heap[size] = expert
            place[expert] = size
            size += 1
            _settle(heap, place, rank, size, size - 1)
    return misses
