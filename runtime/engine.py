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
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from ..collect.errors import ClosedError
from ..collect.topology import MoeTopology
from .cache import EventPlan, ExpertCache
from .clock import Clock
from .counters import Counters
from .forecast import Forecast
from .guard import WINDOW_EVENTS, Guard, Window
from .prefetch import Prefetcher, Windows
from .transfer import Transfer, TransferEngine

log = logging.getLogger(__name__)


class ExpertEngine:
    """Serve experts from slots.

    Args:
        cache: directory of resident experts; its capacity is the number of slots.
        transfers: fills slots.
        block_bytes: bytes of one expert, for the counts.
        prefetcher: admits prefetches; None reads on demand only.
        shadow: an LRU directory without bytes that sees the same events, for the guard.
        predictor_s: gives the CPU seconds that the predictor has used so far, for the guard.
    """

    def __init__(
        self,
        topology: MoeTopology,
        cache: ExpertCache,
        transfers: TransferEngine,
        clock: Clock,
        block_bytes: int,
        *,
        prefetcher: Prefetcher | None = None,
        shadow: ExpertCache | None = None,
        predictor_s: Callable[[], float] | None = None,
    ) -> None:
        self.topology, self.cache, self.transfers, self.clock = topology, cache, transfers, clock
        self.block_bytes = block_bytes
        self.prefetcher, self.shadow = prefetcher, shadow
        self.windows = prefetcher.windows if prefetcher else Windows(topology.num_layers)
        self.counters = Counters(topology.num_layers)
        self.guard = Guard() if shadow is not None else None
        self._predictor_s = predictor_s or (lambda: 0.0)
        self.events_log: list[tuple[tuple[int, ...], bool]] | None = None  # when set, every event is noted
        self._slot_of: dict[int, int] = {}
        self._free = list(range(cache.capacity))
        self._reads: dict[int, Transfer] = {}  # prefetches under way, by expert
        self._link_free_at: float | None = None
        self._last_layer = 0
        self._mark = Window(0, 0, 0, 0, 0.0, 0.0)
        self._lock = threading.RLock()
        self._closed = False

    @contextmanager
    def acquire(
        self, layer: int, needed: Sequence[int], *, one_token: bool, forecast: Forecast | None = None
    ) -> Iterator[Iterator[tuple[int, int]]]:
        """Serve one event: iterate over (expert, slot), resident experts first, then in order of arrival.

        A slot is valid until the iterator is advanced. `needed` are distinct flat indices in ascending order.

        Raises:
            TransferError: if a needed expert cannot be read.
            ClosedError: after `close`.
        """
        with self._lock:
            if self._closed:
                raise ClosedError("This model's experts were closed; load it again to run it.")
            start = self.clock.now()
            event = _Event(self, layer, needed, one_token, forecast)
            try:
                yield event.serve()
            except BaseException:
                event.abort()
                raise
            finally:
                self.counters.experts_s += self.clock.now() - start
            event.abort()  # an iterator left early may still have loads under way; does nothing after a full pass
            self._judge()

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
            self._collect()
            self.cache.check()
            assert set(self._slot_of) == self.cache.resident | set(self._reads), (self._slot_of, self._reads)
            assert sorted([*self._slot_of.values(), *self._free]) == list(range(self.cache.capacity))

    @contextmanager
    def paused(self) -> Iterator[dict[int, int]]:
        """Hold the engine between two events: give the slot of every resident expert (flat index)."""
        with self._lock:
            self._collect()
            yield {expert: self._slot_of[expert] for expert in sorted(self.cache.resident)}

    def reset_counters(self) -> None:
        """Start counting anew; the cache keeps its experts."""
        with self._lock:
            self.counters = Counters(self.topology.num_layers)
            self._mark = Window(0, 0, 0, 0, self._predictor_s(), 0.0)
            self.cache.wasted = 0

    # steps of an event, in order

    def _begin(self, layer: int, needed: Sequence[int], one_token: bool, forecast: Forecast | None) -> EventPlan:
        now = self.clock.now()
        if self._link_free_at is not None:
            self.windows.note_idle(self._last_layer, max(0.0, now - self._link_free_at))
        self._last_layer = layer
        self._collect()
        wasted = self.cache.wasted
        if self.cache.unproven:
            self.counters.on_time += sum(expert in self.cache.unproven for expert in needed)
        acting = self.guard is None or self.guard.acting
        self.cache.policy.foresee(forecast.demand if forecast else None, acting=acting)
        plan = self.cache.event(needed, one_token=one_token)
        if self.shadow is not None:
            self.counters.shadow_misses += len(self.shadow.event(needed, one_token=one_token).misses)
        if self.events_log is not None:
            self.events_log.append((tuple(needed), one_token))
        counters = self.counters
        counters.wasted += self.cache.wasted - wasted
        counters.count(layer, len(plan.hits), len(plan.delayed), len(plan.misses), len(plan.leaving))
        return plan

    def _collect(self) -> None:
        """Take in prefetches that ended since the last event."""
        for expert, transfer in list(self._reads.items()):
            if transfer.done():
                del self._reads[expert]
                if transfer.error is None:
                    self.cache.land(expert)
                else:
                    self.counters.failed_prefetches += 1
                    self.cache.abandon(expert)
                    self._free.append(self._slot_of.pop(expert))

    def _correct(self, layer: int, needed: Sequence[int]) -> None:
        """Drop prefetches for this layer that the router did not choose."""
        if not self._reads:
            return
        low, high = self.topology.offsets[layer], self.topology.offsets[layer + 1]
        for expert in [e for e in self._reads if low <= e < high and e not in needed]:
            self._drop_prefetch(expert)

    def _drop_prefetch(self, expert: int) -> None:
        self.transfers.cancel(self._reads.pop(expert))  # a read into the same slot starts only after this one ended
        self.cache.abandon(expert)
        self._free.append(self._slot_of.pop(expert))
        self.counters.dropped_prefetches += 1

    def _prefetch(self, layer: int, needed: Sequence[int], forecast: Forecast | None) -> None:
        """Submit what the idle windows hold; workers start it when no demand is left."""
        if self.prefetcher is None or forecast is None or (self.guard is not None and not self.guard.acting):
            return
        cache = self.cache

        def absent(expert: int) -> bool:
            return expert not in cache.resident and expert not in cache.in_flight

        pinned = frozenset(needed)
        for expert in self.prefetcher.plan(layer, forecast, len(self._reads), absent):
            target = cache.clock + (self._layer_of(expert) - layer)
            leaving = cache.admit(expert, target, pinned)
            if leaving is None:
                return
            self._free.extend(self._slot_of.pop(gone) for gone in leaving)
            self.counters.evictions += len(leaving)
            slot = self._free.pop()
            self._slot_of[expert] = slot
            self._reads[expert] = self.transfers.submit(expert, slot, demand=False)
            self.counters.prefetches += 1

    def _layer_of(self, expert: int) -> int:
        return self.topology.ids[expert].layer

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


class _Event:
    """One event while it is served."""

    def __init__(
        self, engine: ExpertEngine, layer: int, needed: Sequence[int], one_token: bool, forecast: Forecast | None
    ) -> None:
        self.engine, self.layer, self.needed, self.forecast = engine, layer, needed, forecast
        engine._correct(layer, needed)
        plan = engine._begin(layer, needed, one_token, forecast)
        self.leaving = set(plan.leaving)
        self.hits = sorted(plan.hits, key=lambda expert: expert not in self.leaving)
        # experts that only pass through come first, so that those that stay find the last slots
        self.queue = deque(sorted(plan.misses, key=lambda expert: expert not in self.leaving))
        self.pending: dict[int, Transfer] = {}
        for expert in plan.leaving:
            if expert not in needed:
                engine._free.append(engine._slot_of.pop(expert))
        for expert in plan.delayed:
            self.pending[expert] = self._promote(engine._reads.pop(expert))
        self.computed: list[int] = []  # in slots, computed, staying
        self._load()
        if not self.pending and not self.queue:
            self._link_is_free()

    def serve(self) -> Iterator[tuple[int, int]]:
        engine = self.engine
        for expert in self.hits:
            yield expert, engine._slot_of[expert]
            self._computed(expert)
        while self.pending or self.queue:
            if not self.pending:
                self._make_room()
                continue
            start = engine.clock.now()
            transfer = engine.transfers.wait_any(list(self.pending.values()))
            engine.counters.stall_s += engine.clock.now() - start
            expert = transfer.expert
            del self.pending[expert]
            if transfer.started_s is not None and transfer.finished_s is not None:
                engine.windows.note_read(transfer.finished_s - transfer.started_s)
            self._load()
            if not self.pending and not self.queue:
                self._link_is_free()
            yield expert, transfer.slot
            self._computed(expert)

    def abort(self) -> None:
        """End every load of this event and make the directory agree with the slots."""
        engine = self.engine
        for expert, transfer in self.pending.items():
            engine.transfers.cancel(transfer)
            engine.cache.forget(expert)
            self.leaving.discard(expert)
            engine._free.append(engine._slot_of.pop(expert))
        self.pending.clear()
        for expert in self.queue:
            engine.cache.forget(expert)
        self.queue.clear()
        for expert in self.leaving & set(self.needed):
            slot = engine._slot_of.pop(expert, None)
            if slot is not None:
                engine._free.append(slot)
        self.leaving.clear()

    def _promote(self, transfer: Transfer) -> Transfer:
        engine = self.engine
        if transfer.done() and transfer.error is not None:  # a prefetch that failed is read again, as a demand
            engine.counters.failed_prefetches += 1
            return engine.transfers.submit(transfer.expert, transfer.slot, demand=True)
        engine.transfers.promote(transfer)
        return transfer

    def _load(self) -> None:
        engine = self.engine
        while self.queue and engine._free:
            expert = self.queue.popleft()
            slot = engine._free.pop()
            engine._slot_of[expert] = slot
            self.pending[expert] = engine.transfers.submit(expert, slot, demand=True)

    def _link_is_free(self) -> None:
        engine = self.engine
        engine._link_free_at = engine.clock.now()
        engine._prefetch(self.layer, self.needed, self.forecast)

    def _computed(self, expert: int) -> None:
        engine = self.engine
        if expert in self.leaving:
            engine._free.append(engine._slot_of.pop(expert))
            self.leaving.discard(expert)
            self._load()
        else:
            self.computed.append(expert)

    def _make_room(self) -> None:
        """Find a slot for a load when none is free: one of an open prefetch, or else of a computed expert."""
        engine = self.engine
        if engine._reads:
            engine._drop_prefetch(next(iter(engine._reads)))
        else:
            expert = self.computed.pop(0)
            engine.cache.forget(expert)
            engine._free.append(engine._slot_of.pop(expert))
            engine.counters.evictions += 1
        self._load()
