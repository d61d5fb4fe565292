"""LRU per layer, as in Mixtral-offloading: every layer has its own slots, and the experts of a layer share only those.

The capacity is spread evenly, the first layers taking what is left over. A layer over its share gives up its least
recently used experts although other layers may have room. Where one token needs more experts than the share, the
layer keeps them until its next event, and other layers make room.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from itertools import islice

import numpy as np

from ...collect.topology import MoeTopology
from .lru import Lru


def layer_shares(topology: MoeTopology, capacity: int) -> list[int]:
    """Spread a capacity evenly over the layers; the first ones take what is left over."""
    each, more = divmod(capacity, topology.num_layers)
    return [each + (layer < more) for layer in range(topology.num_layers)]


class LayerLru(Lru):
    """Evict the least recently used expert of the layer that is over its share."""

    def __init__(self, topology: MoeTopology, capacity: int) -> None:
        super().__init__()
        self.shares = layer_shares(topology, capacity)
        self._layer_of = np.repeat(np.arange(topology.num_layers), np.diff(topology.offsets)).tolist()
        self._orders: list[OrderedDict[int, None]] = [OrderedDict() for _ in self.shares]
        self._last = 0

    def use(self, needed: Sequence[int], event: int) -> None:
        """Move the event's experts behind all others of their layer."""
        super().use(needed, event)
        self._last = self._layer_of[needed[0]]
        order = self._orders[self._last]
        for expert in needed:
            order[expert] = None
            order.move_to_end(expert)

    def overdue(self, protected: AbstractSet[int]) -> list[int]:
        """Name what the layer of the event holds beyond its share."""
        order = self._orders[self._last]
        excess = len(order) - self.shares[self._last]
        if excess <= 0:
            return []
        return list(islice((expert for expert in order if expert not in protected), excess))

    def victims(self, count: int, protected: AbstractSet[int]) -> list[int]:
        """Name experts beyond their layers' shares first, then the least recently used of all."""
        beyond = {
            expert
            for order, share in zip(self._orders, self.shares, strict=True)
            if len(order) > share
            for expert in islice(order, len(order) - share)
        }
        first = [expert for expert in self._order if expert in beyond and expert not in protected]
        return [*first, *super().victims(count, protected | beyond)][:count]

    def remove(self, expert: int) -> None:
        """Forget an expert."""
        super().remove(expert)
        self._orders[self._layer_of[expert]].pop(expert, None)
