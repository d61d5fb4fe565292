"""Compiled replay of policies whose scores change between uses: LFRU, activation-aware, random. Knows flat arrays only.

A victim is found by looking at every expert: about a microsecond for some hundred.
"""

from __future__ import annotations

import numpy as np

from ..events import Events
from ..policies.activation import EPSILON, layer_weights
from ..policies.registry import PolicySetting
from .jit import compiled


def lfru(events: Events, setting: PolicySetting) -> np.ndarray:
    """Give the misses of each event under LFRU, int32 [N]."""
    experts = setting.topology.num_experts
    return _lfru(events.experts, events.starts, events.tokens == 1, setting.capacity, experts)


def activation(events: Events, setting: PolicySetting) -> np.ndarray:
    """Give the misses of each event under activation-aware eviction, int32 [N]."""
    offsets, weights = np.array(setting.topology.offsets, np.int64), np.array(layer_weights(setting.topology))
    arrays = (events.experts, events.starts, events.tokens == 1, events.layers, events.sequences)
    return _activation(*arrays, setting.capacity, offsets, weights)


def random(events: Events, setting: PolicySetting) -> np.ndarray:
    """Give the misses of each event under random eviction, int32 [N]."""
    draws, experts = np.random.default_rng(setting.seed), setting.topology.num_experts
    return _random(events.experts, events.starts, events.tokens == 1, setting.capacity, experts, draws)


@compiled
def least(scores, used, before):
    """Find the smallest score among the residents last used before an event; ties go to the smallest expert."""
    least = -1
    for expert in range(len(scores)):
        if 0 <= used[expert] < before and (least < 0 or scores[expert] < scores[least]):
            least = expert
    return least


@compiled
def _lfru(experts, starts, single, capacity, num_experts):
    used = np.full(num_experts, -1, np.int64)  # last event of each resident expert, -1 where absent
    uses = np.zeros(num_experts)
    entered = np.zeros(num_experts)
    held = 0
    misses = np.zeros(len(single), np.int32)
    for event in range(len(single)):
        first, last = starts[event], starts[event + 1]
        for index in range(first, last):
            expert = experts[index]
            if used[expert] < 0:
                misses[event] += 1
                held += 1
                uses[expert] = 0.0
                entered[expert] = event
            used[expert] = event
            uses[expert] += 1.0
        before = event if single[event] and last - first <= capacity else event + 1  # who was used later is protected
        while held > capacity:
            least, lowest = -1, 0.0
            for expert in range(num_experts):
                if 0 <= used[expert] < before:
                    score = uses[expert] / ((event + 1.0) - entered[expert])
                    if least < 0 or score < lowest:
                        least, lowest = expert, score
            used[least] = -1
            held -= 1
    return misses


@compiled
def _activation(experts, starts, single, layers, sequences, capacity, offsets, weights):
    num_experts = offsets[-1]
    used = np.full(num_experts, -1, np.int64)
    uses = np.zeros(num_experts)
    sums = np.zeros(len(weights))
    scores = np.zeros(num_experts)
    held = 0
    misses = np.zeros(len(single), np.int32)
    for event in range(len(single)):
        if event == 0 or sequences[event] != sequences[event - 1]:
            uses[:] = 0.0
            sums[:] = 0.0
            for layer in range(len(weights)):
                scores[offsets[layer] : offsets[layer + 1]] = weights[layer] / (offsets[layer + 1] - offsets[layer])
        first, last = starts[event], starts[event + 1]
        for index in range(first, last):
            expert = experts[index]
            if used[expert] < 0:
                misses[event] += 1
                held += 1
            used[expert] = event
            uses[expert] += 1.0
        layer = layers[event]
        low, high = offsets[layer], offsets[layer + 1]
        sums[layer] += last - first
        scale = weights[layer] / (sums[layer] + EPSILON * (high - low))
        for expert in range(low, high):
            scores[expert] = (uses[expert] + EPSILON) * scale
        before = event if single[event] and last - first <= capacity else event + 1  # who was used later is protected
        while held > capacity:
            used[least(scores, used, before)] = -1
            held -= 1
    return misses


@compiled
def _random(experts, starts, single, capacity, num_experts, draws):
    used = np.full(num_experts, -1, np.int64)
    held = 0
    misses = np.zeros(len(single), np.int32)
    for event in range(len(single)):
        first, last = starts[event], starts[event + 1]
        for index in range(first, last):
            expert = experts[index]
            if used[expert] < 0:
                misses[event] += 1
                held += 1
            used[expert] = event
        if held <= capacity:
            continue
        scores = draws.random(num_experts)
        before = event if single[event] and last - first <= capacity else event + 1  # who was used later is protected
        while held > capacity:
            used[least(scores, used, before)] = -1
            held -= 1
    return misses
