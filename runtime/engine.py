"""The engine: serves what MoE layers need from slots, reads what is absent, and prefetches in between.

One step reads as six verbs: predict -> prefetch -> route -> correct -> acquire -> compute; predict runs in its own
thread, compute in the caller of `acquire`, which gets resident experts first and then the others as they arrive.

Threads: compute threads call `acquire`, one at a time (a lock serialises them); it alone changes the cache and hands
out slots. Transfer workers only fill slots. Guarantees: a slot is not refilled before its expert was computed or has
left the cache; after an error no load of the event is left and the directory agrees with the slots.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from ..collect.errors import ClosedError
from ..collect.topology import MoeTopology
from .cache import EventPlan, ExpertCache
from .clock import Clock
from .counters import Counters
from .forecast import Forecast
from .guard import WINDOW_EVENTS, Guard, Window
from .placement import Placement
from .prefetch import Prefetcher, Windows
from .replay import Event
from .serving import Serving
from .transfer import TransferEngine

log = logging.getLogger(__name__)


class ExpertEngine:
    """Serve experts from slots.

    Args:
        cache: directory of resident experts; `slots_for` says how many slots it needs.
        transfers: fills slots.
        prefetcher: admits prefetches; None reads on demand only.
        shadow: an LRU directory without bytes that sees the same events, for the guard.
        predictor_s: gives the seconds that the predictor has been busy so far, for the guard.
    """

    def __init__(
        self,
        topology: MoeTopology,
        cache: ExpertCache,
        transfers: TransferEngine,
        clock: Clock,
        *,
        prefetcher: Prefetcher | None = None,
        shadow: ExpertCache | None = None,
        predictor_s: Callable[[], float] | None = None,
    ) -> None:
        self.topology, self.cache, self.clock = topology, cache, clock
        self.prefetcher, self.shadow = prefetcher, shadow
        self.windows = prefetcher.windows if prefetcher else Windows(topology.num_layers)
        self.counters = Counters(topology.num_layers)
        self.placement = Placement(cache, transfers, topology.num_experts, self.counters)
        self.guard = Guard() if shadow is not None else None
        self._predictor_s = predictor_s or (lambda: 0.0)
        self.events_log: list[Event] | None = None  # when set, every event is noted
        self._link_free_at: float | None = None
        self._last_layer = 0
        self._mark = Window(0, 0, 0, 0, 0.0, 0.0)
        self._wasted = 0  # of the cache, as far as it is in the counters
        self._lock = threading.RLock()
        self._closed = False

    @contextmanager
    def acquire(
        self, layer: int, needed: Sequence[int], *, one_token: bool, forecast: Forecast | None = None
    ) -> Iterator[Iterator[tuple[int, int]]]:
        """Serve one event: iterate over (expert, slot), resident experts first, then in order of arrival.

        A slot is valid until the iterator is advanced, and none is after the `with` block. `needed` are distinct flat
        indices in ascending order, at least one.

        Raises:
            TransferError: if a needed expert cannot be read.
            ClosedError: after `close`.
        """
        with self._lock:
            if self._closed:
                raise ClosedError("This model's experts were closed; load it again to run it.")
            start = self.clock.now()
            self._note_idle(layer, start)
            plan = self._begin(layer, needed, one_token, forecast)

            def on_idle() -> None:
                self._link_free_at = self.clock.now()
                self._prefetch(layer, needed, forecast)

            serving = Serving(self.placement, needed, plan, self.clock, self.windows, on_idle)
            try:
                serving.start()
                yield serving.experts
            finally:
                serving.end()
                self.counters.wasted += self.cache.wasted - self._wasted
                self._wasted = self.cache.wasted
                self.counters.experts_s += self.clock.now() - start
            self._judge()

    @property
    def acting(self) -> bool:
        """Whether forecasts are acted on, as far as the guard has a say."""
        return self.guard is None or self.guard.acting

    def close(self) -> None:
        """Stop serving; a second call does nothing."""
        with self._lock:
            self._closed = True

    def check(self) -> None:
        """Verify that the slots agree with the directory.

        Raises:
            AssertionError: if they do not.
        """
        with self._lock:
            self.placement.collect()
            self.placement.check()

    @contextmanager
    def paused(self) -> Iterator[dict[int, int]]:
        """Hold the engine between two events: give the slot of every resident expert (flat index)."""
        with self._lock:
            self.placement.collect()
            yield self.placement.resident()

    def reset_counters(self) -> None:
        """Start counting anew; the cache keeps its experts."""
        with self._lock:
            self.counters.reset()
            self._mark = Window(0, 0, 0, 0, self._predictor_s(), 0.0)

    # steps of an event, in order

    def _note_idle(self, layer: int, now: float) -> None:
        """Note how long the link had nothing to read for the layer before."""
        if self._link_free_at is not None:
            self.windows.note_idle(self._last_layer, max(0.0, now - self._link_free_at))
        self._link_free_at, self._last_layer = None, layer

    def _begin(self, layer: int, needed: Sequence[int], one_token: bool, forecast: Forecast | None) -> EventPlan:
        self.placement.collect()
        self._correct(layer, needed)
        counters = self.counters
        if self.cache.unproven:
            counters.on_time += sum(expert in self.cache.unproven for expert in needed)
        self.cache.policy.foresee(forecast, acting=self.acting)
        plan = self.placement.begin(needed, one_token)
        if self.shadow is not None:
            counters.shadow_misses += len(self.shadow.event(needed, one_token=one_token).misses)
        if self.events_log is not None:
            self.events_log.append(Event(tuple(needed), one_token))
        counters.count(layer, len(plan.hits), len(plan.delayed), len(plan.misses), len(plan.leaving))
        return plan

    def _correct(self, layer: int, needed: Sequence[int]) -> None:
        """Drop prefetches for this layer that the router did not choose."""
        low, high = self.topology.offsets[layer], self.topology.offsets[layer + 1]
        for expert in [e for e in self.placement.prefetches if low <= e < high and e not in needed]:
            self.placement.drop(expert)

    def _prefetch(self, layer: int, needed: Sequence[int], forecast: Forecast | None) -> None:
        """Submit what the idle windows hold; workers start it when no demand is left."""
        if self.prefetcher is None or forecast is None or not self.acting:
            return
        cache, placement = self.cache, self.placement

        def absent(expert: int) -> bool:
            return expert not in cache.resident and expert not in cache.in_flight

        pinned = frozenset(needed)
        for expert in self.prefetcher.plan(layer, forecast, len(placement.prefetches), absent):
            event = cache.clock + self.topology.ids[expert].layer - layer
            if not placement.prefetch(expert, event, pinned):
                return

    def _judge(self) -> None:
        """After every window of events, let the guard decide whether forecasts are acted on."""
        counters = self.counters
        if self.guard is None or counters.events % WINDOW_EVENTS:
            return
        loaded = counters.misses + counters.delayed_hits + counters.on_time
        read_s = self.windows.read_s or 0.0
        total = Window(counters.shadow_misses, loaded, counters.on_time, counters.wasted, self._predictor_s(), read_s)
        window, self._mark = total.since(self._mark), total
        before = self.guard.acting
        if self.guard.judge(window) != before:
            log.info("%s", self.guard.reason)
