"""Compiled replay of policies that keep experts in queues: LRU, LRU per layer, S3-FIFO. Knows flat arrays only."""

from __future__ import annotations

import numpy as np

from ..events import Events
from ..policies.layer_lru import layer_shares
from ..policies.registry import PolicySetting
from ..policies.s3fifo import MOST_USES, queue_sizes
from .jit import compiled


def lru(events: Events, setting: PolicySetting) -> np.ndarray:
    """Give the misses of each event under LRU, int32 [N]."""
    return _lru(events.experts, events.starts, events.tokens == 1, setting.capacity, setting.topology.num_experts)


def layer_lru(events: Events, setting: PolicySetting) -> np.ndarray:
    """Give the misses of each event under LRU per layer, int32 [N]."""
    shares = np.array(layer_shares(setting.topology, setting.capacity), np.int64)
    offsets = np.array(setting.topology.offsets, np.int64)
    single = events.tokens == 1
    return _layer_lru(events.experts, events.starts, single, events.layers, setting.capacity, shares, offsets)


def s3fifo(events: Events, setting: PolicySetting) -> np.ndarray:
    """Give the misses of each event under S3-FIFO, int32 [N]."""
    small, ghost = queue_sizes(setting.capacity)
    experts, single = setting.topology.num_experts, events.tokens == 1
    return _s3fifo(events.experts, events.starts, single, setting.capacity, experts, small, ghost)


@compiled
def _lru(experts, starts, single, capacity, num_experts):
    # a ring through `num_experts` as its end: after[end] is the oldest; before[e] < 0 where e is absent
    end = num_experts
    after = np.full(num_experts + 1, end, np.int32)
    before = np.full(num_experts + 1, -1, np.int32)
    before[end] = end
    held = 0
    misses = np.zeros(len(single), np.int32)
    for event in range(len(single)):
        first, last = starts[event], starts[event + 1]
        for index in range(first, last):
            expert = experts[index]
            if before[expert] < 0:
                misses[event] += 1
                held += 1
            else:
                after[before[expert]] = after[expert]
                before[after[expert]] = before[expert]
            newest = before[end]
            after[newest] = expert
            before[expert] = newest
            after[expert] = end
            before[end] = expert
        # a token's own experts are the newest: where they fit at all, none of them is among the oldest that leave
        while held > capacity:
            oldest = after[end]
            after[end] = after[oldest]
            before[after[oldest]] = end
            before[oldest] = -1
            held -= 1
    return misses


@compiled
def _layer_lru(experts, starts, single, layers, capacity, shares, offsets):
    num_experts, num_layers = offsets[-1], len(shares)
    used = np.full(num_experts, -1, np.int64)  # last event of each resident expert, -1 where absent
    held = np.zeros(num_layers, np.int64)  # residents of each layer
    beyond = np.zeros(num_experts, np.bool_)
    total = 0
    misses = np.zeros(len(single), np.int32)
    for event in range(len(single)):
        first, last = starts[event], starts[event + 1]
        layer = layers[event]
        for index in range(first, last):
            expert = experts[index]
            if used[expert] < 0:
                misses[event] += 1
                held[layer] += 1
                total += 1
            used[expert] = event
        before = event if single[event] and last - first <= capacity else event + 1  # who was used later is protected
        while held[layer] > shares[layer]:
            oldest = _oldest(used, offsets[layer], offsets[layer + 1], before)
            if oldest < 0:
                break
            used[oldest] = -1
            held[layer] -= 1
            total -= 1
        if total <= capacity:
            continue
        # some layer keeps more than its share for its token: others make room, those beyond their shares first
        beyond[:] = False
        for other in range(num_layers):
            for _ in range(held[other] - shares[other]):
                oldest = -1
                for expert in range(offsets[other], offsets[other + 1]):
                    if used[expert] >= 0 and not beyond[expert] and (oldest < 0 or used[expert] < used[oldest]):
                        oldest = expert
                beyond[oldest] = True
        while total > capacity:
            victim = -1
            for expert in range(num_experts):
                if 0 <= used[expert] < before and (
                    victim < 0
                    or (beyond[expert] and not beyond[victim])
                    or (beyond[expert] == beyond[victim] and used[expert] < used[victim])
                ):
                    victim = expert
            used[victim] = -1
            total -= 1
            for other in range(num_layers):
                if victim < offsets[other + 1]:
                    held[other] -= 1
                    break
    return misses


@compiled
def _oldest(used, low, high, before):
    """Find the least recently used expert of a range that was last used before an event; -1 where there is none."""
    oldest = -1
    for expert in range(low, high):
        if 0 <= used[expert] < before and (oldest < 0 or used[expert] < used[oldest]):
            oldest = expert
    return oldest


@compiled
def _leave(after, before, expert):
    after[before[expert]] = after[expert]
    before[after[expert]] = before[expert]


@compiled
def _enter(after, before, end, expert):
    newest = before[end]
    after[newest] = expert
    before[expert] = newest
    after[expert] = end
    before[end] = expert


@compiled
def _s3fifo(experts, starts, single, capacity, num_experts, small_size, ghost_size):
    # three rings through their ends: an expert is in none (0), the small (1), the main (2) or the ghost queue (3)
    small, main, ghost = num_experts, num_experts + 1, num_experts + 2
    after = np.arange(num_experts + 3)
    before = np.arange(num_experts + 3)
    queue = np.zeros(num_experts, np.int8)
    length = np.zeros(4, np.int64)
    uses = np.zeros(num_experts, np.int64)
    used = np.full(num_experts, -1, np.int64)
    misses = np.zeros(len(single), np.int32)
    for event in range(len(single)):
        first, last = starts[event], starts[event + 1]
        for index in range(first, last):
            expert = experts[index]
            used[expert] = event
            if queue[expert] == 1 or queue[expert] == 2:
                uses[expert] = min(MOST_USES, uses[expert] + 1)
                continue
            misses[event] += 1
            uses[expert] = 0
            if queue[expert] == 3:
                _leave(after, before, expert)
                length[3] -= 1
                queue[expert] = 2
                _enter(after, before, main, expert)
            else:
                queue[expert] = 1
                _enter(after, before, small, expert)
            length[queue[expert]] += 1
        bound = event if single[event] and last - first <= capacity else event + 1  # who was used later is protected
        while length[1] + length[2] > capacity:
            oldest = after[small]
            while oldest != small and used[oldest] >= bound:
                oldest = after[oldest]
            next_main = after[main]
            while next_main != main and used[next_main] >= bound:
                next_main = after[next_main]
            if oldest != small and (length[1] >= small_size or next_main == main):
                expert, stays = oldest, uses[oldest] > 1
                uses[expert] = 0
            else:
                expert, stays = next_main, uses[next_main] > 0
                uses[expert] -= 1
            _leave(after, before, expert)
            length[queue[expert]] -= 1
            if stays:
                queue[expert] = 2
                length[2] += 1
                _enter(after, before, main, expert)
            elif queue[expert] == 1:
                queue[expert] = 3
                length[3] += 1
                _enter(after, before, ghost, expert)
                if length[3] > ghost_size:
                    forgotten = after[ghost]
                    _leave(after, before, forgotten)
                    length[3] -= 1
                    queue[forgotten] = 0
            else:
                queue[expert] = 0
    return misses
