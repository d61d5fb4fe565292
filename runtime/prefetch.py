"""Prefetch admission: which experts to read ahead in the link's idle windows. Knows no threads, slots or bytes.

After an event's demands are served the link idles until the next layer's router has spoken. Those windows are measured
per layer, and a prefetch is admitted only where the windows up to its layer hold the time of its read and of the
prefetches before it. Where the link has no idle time nothing is admitted.

Example: windows of 2 ms after each layer and reads of 3 ms: after layer 0 an expert of layer 1 has 2 ms, too little;
one of layer 2 has 4 ms and is admitted; a second one of layer 2 would need 6 ms and is not.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..collect.topology import MoeTopology
from .forecast import Forecast

SMOOTHING = 0.1  # weight of the newest measurement; a window of about ten events


class Windows:
    """Measure how long the link idles after each MoE layer, and how long one read takes."""

    def __init__(self, num_layers: int) -> None:
        self.idle_s = [0.0] * num_layers
        self.read_s: float | None = None

    def note_idle(self, layer: int, seconds: float) -> None:
        """Note the idle time between a layer's last demand and the next event."""
        self.idle_s[layer] += SMOOTHING * (seconds - self.idle_s[layer])

    def note_read(self, seconds: float) -> None:
        """Note how long one expert's read took."""
        self.read_s = seconds if self.read_s is None else self.read_s + SMOOTHING * (seconds - self.read_s)


class Prefetcher:
    """Order a forecast's experts and admit those that arrive before their layer.

    Args:
        threshold: smallest probability worth a read; below one half a guess is more often wrong than right.
        limit: prefetches that may be admitted after one layer.
    """

    def __init__(self, topology: MoeTopology, windows: Windows, *, threshold: float = 0.5, limit: int = 4) -> None:
        self.windows, self.threshold, self.limit = windows, threshold, limit
        self._offsets = topology.offsets
        self._layer_of = np.repeat(np.arange(topology.num_layers), [layer.num_experts for layer in topology.layers])
        self._step = -1
        self._order: list[tuple[int, int]] = []  # (layer, expert) by layer, likeliest first

    def plan(self, layer: int, forecast: Forecast, queued: int, absent: Callable[[int], bool]) -> list[int]:
        """Name the experts to prefetch after `layer`, in order of need; `queued` reads are under way already."""
        read_s = self.windows.read_s
        if read_s is None:
            return []
        if forecast.step != self._step:
            self._rank(forecast)
        chosen: list[int] = []
        budget, reached = 0.0, layer
        for target, expert in self._order:
            if target <= layer:
                continue
            while reached < target:
                budget += self.windows.idle_s[reached]
                reached += 1
            if len(chosen) == self.limit:
                break
            if absent(expert) and (queued + len(chosen) + 1) * read_s <= budget:
                chosen.append(expert)
        return chosen

    def _rank(self, forecast: Forecast) -> None:
        likely = np.nonzero(forecast.demand >= self.threshold)[0]
        layers = self._layer_of[likely]
        order = np.lexsort((-forecast.demand[likely], layers))
        self._order = list(zip(layers[order].tolist(), likely[order].tolist(), strict=True))
        self._step = forecast.step
