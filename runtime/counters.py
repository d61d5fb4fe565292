"""Running counts of an engine; `RuntimeStats` is their frozen snapshot."""

from __future__ import annotations


class Counters:
    """Add up what an engine does."""

    def __init__(self, num_layers: int) -> None:
        self.num_layers = num_layers
        self.reset()

    def reset(self) -> None:
        """Start anew."""
        self.tokens = 0
        self.steps = 0
        self.events = 0
        self.hits = 0
        self.delayed_hits = 0
        self.misses = 0
        self.evictions = 0
        self.prefetches = 0
        self.on_time = 0
        self.wasted = 0
        self.dropped_prefetches = 0
        self.failed_prefetches = 0
        self.shadow_misses = 0
        self.stall_s = 0.0
        self.experts_s = 0.0
        self.forecasts = 0
        self.late_forecasts = 0
        self.named = 0
        self.named_right = 0
        self.layers = [[0, 0, 0] for _ in range(self.num_layers)]

    def count(self, layer: int, hits: int, delayed: int, misses: int, leaving: int) -> None:
        """Count one event of a layer."""
        self.events += 1
        self.hits += hits
        self.delayed_hits += delayed
        self.misses += misses
        self.evictions += leaving
        row = self.layers[layer]
        row[0] += hits
        row[1] += delayed
        row[2] += misses
