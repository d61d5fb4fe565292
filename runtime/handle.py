"""What an offloaded model carries as `model.foregate`: store, slots, engine and predictor, and their numbers."""

from __future__ import annotations

import threading
import weakref
from contextlib import ExitStack
from typing import Any

from torch import nn

from ..collect.anatomy import text_model
from ..collect.architectures import find_moe_modules
from ..collect.errors import StoreError
from ..predictors.base import Predictor
from .blocks import BlockLayout
from .cache import ExpertCache
from .clock import SystemClock
from .config import RuntimeConfig
from .engine import ExpertEngine
from .layers import LoopedLayers, OffloadedLayer, Place, layer_class
from .placement import slots_for
from .policies import Lru, Predicted
from .predictor_thread import PredictorThread
from .prefetch import Prefetcher, Windows
from .readers import open_reader
from .slots import SlotArena
from .stats import LayerStats, RuntimeStats
from .steps import StepTracker
from .store import ExpertStore
from .transfer import ThreadedTransfers


class Foregate:
    """Hold everything that serves one model's experts; `close` ends it, and so does leaving a `with` block.

    Raises:
        StoreError: if the store does not fit the model.
        SettingError: if the slots cannot hold one token's experts.
        BundleError: if the predictor was made for another topology.
    """

    def __init__(self, model: nn.Module, store: ExpertStore, config: RuntimeConfig) -> None:
        self.store, self.config = store, config
        self._hooks: list[Any] = []
        modules = find_moe_modules(model)
        if [item.name for item in modules] != store.module_names:
            raise StoreError(
                f"{store.path} holds experts for {', '.join(store.module_names[:2])}, .., the model has "
                f"{', '.join(item.name for item in modules[:2])}, ..; pack this model again."
            )
        if tuple(item.layer for item in modules) != tuple(store.topology.layers):
            raise StoreError(
                f"{store.path} was altered: its manifest says {store.topology.describe()}, and its model has other MoE "
                "layers; pack the model again."
            )
        held = config.num_slots(store.topology, store.block_bytes)
        predictor = self._open_predictor(config, store)  # before memory is taken: it may refuse
        self.arena = SlotArena(slots_for(held, store.topology.num_experts), store.block_bytes)
        clock = SystemClock()
        with ExitStack() as opened:
            self.reader = open_reader(store.files, config.reader)
            opened.callback(self.reader.close)
            self.transfers = ThreadedTransfers(
                store, self.arena.buffer, self.reader, num_threads=config.threads, chunk_bytes=config.chunk_kib * 1024
            )
            opened.callback(self.transfers.close)
            self.predictor = PredictorThread(predictor, store.topology, clock) if predictor is not None else None
            if self.predictor is not None:
                opened.callback(self.predictor.close)
            self.engine = self._engine(held, clock)
            self.steps = StepTracker(
                store.topology, self.engine.counters, self.predictor, wanted=lambda: self.engine.acting
            )
            self.steps.acting = config.mode in ("enforce", "auto")
            self._attach(model)
            self._opened = opened.pop_all()
        # for a model that is dropped without close
        self._finalizer = weakref.finalize(self, _close_in_background, self._opened)
        self._finalizer.atexit = False  # the process ends the threads, and no new one may start then
        self._since = self._totals()

    def stats(self) -> RuntimeStats:
        """Give a frozen snapshot of the numbers since load or the last `reset_stats`."""
        counters = self.engine.counters
        mode, reason = self._mode()
        (read, calls, busy_s), (read_before, calls_before, busy_before) = self._totals(), self._since
        calls -= calls_before
        return RuntimeStats(
            tokens=counters.tokens,
            steps=counters.steps,
            events=counters.events,
            hits=counters.hits,
            delayed_hits=counters.delayed_hits,
            misses=counters.misses,
            evictions=counters.evictions,
            prefetches=counters.prefetches,
            dropped_prefetches=counters.dropped_prefetches,
            failed_prefetches=counters.failed_prefetches,
            on_time=counters.on_time,
            wasted_bytes=counters.wasted * self.store.block_bytes,
            bytes_read=read - read_before,
            stall_s=counters.stall_s,
            experts_s=counters.experts_s,
            forecasts=counters.forecasts,
            late_forecasts=counters.late_forecasts,
            forecast_recall=counters.named_right / counters.named if counters.named else None,
            predictor_ms=1e3 * (busy_s - busy_before) / calls if calls else None,
            mode=mode,
            reason=reason,
            slots=self.engine.cache.capacity,
            experts=self.store.topology.num_experts,
            block_bytes=self.store.block_bytes,
            reader=self.reader.kind,
            per_layer=tuple(
                LayerStats(hits=hits, delayed_hits=delayed, misses=misses) for hits, delayed, misses in counters.layers
            ),
        )

    def reset_stats(self) -> None:
        """Start counting anew; the cache keeps its experts."""
        self.engine.reset_counters()
        self._since = self._totals()

    def damaged_slots(self) -> list[int]:
        """Compare every resident expert's slot with the store's checksum and list the flat indices that differ."""
        with self.engine.paused() as slot_of:
            return [
                expert
                for expert, slot in slot_of.items()
                if not self.store.verify_expert(expert, self.arena.buffer(slot))
            ]

    def close(self) -> None:
        """Take the hooks back and join every thread; a second call does nothing."""
        self.steps.detach()
        while self._hooks:
            self._hooks.pop().remove()
        self.engine.close()
        self._finalizer.detach()
        self._opened.close()

    def __enter__(self) -> Foregate:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _open_predictor(self, config: RuntimeConfig, store: ExpertStore) -> Predictor | None:
        if config.predictor is None or config.mode == "off":
            return None
        from ..predictors.bundle import Bundle, load_predictor  # brings onnxruntime, which other users do not need
        from ..predictors.hub import local_bundle

        bundle = Bundle.open(local_bundle(config.predictor))
        bundle.require(store.topology, store.fingerprint)
        return load_predictor(bundle)

    def _engine(self, held: int, clock: SystemClock) -> ExpertEngine:
        config, topology = self.config, self.store.topology
        acting = self.predictor is not None and config.mode in ("enforce", "auto")
        most = held - max(layer.top_k for layer in topology.layers)
        wished = max(1, int(config.probation * held)) if config.probation else 0
        probation = min(wished, most) if acting else 0
        prefetcher = None
        if probation > 0:
            prefetcher = Prefetcher(
                topology, Windows(topology.num_layers), threshold=config.prefetch_threshold, limit=probation
            )
        shadow = ExpertCache(held, Lru()) if acting and config.mode == "auto" else None
        return ExpertEngine(
            topology,
            ExpertCache(held, Predicted(topology) if acting else Lru(), probation=probation),
            self.transfers,
            clock,
            prefetcher=prefetcher,
            shadow=shadow,
            predictor_s=self._predictor_s,
        )

    def _totals(self) -> tuple[int, int, float]:
        """Give bytes read, predictor calls and predictor seconds since load."""
        transfers, predictor = self.transfers.stats(), self.predictor
        calls, busy_s = (predictor.calls, predictor.busy_s) if predictor is not None else (0, 0.0)
        return transfers.demand_bytes + transfers.prefetch_bytes, calls, busy_s

    def _predictor_s(self) -> float:
        return self.predictor.busy_s if self.predictor is not None else 0.0

    def _attach(self, model: nn.Module) -> None:
        shared: dict[tuple[str, BlockLayout], Any] = {}
        layers: dict[str, list[OffloadedLayer]] = {}
        for index, item in enumerate(find_moe_modules(model)):
            module: Any = model.get_submodule(item.name)
            layout = self.store.layout(index)
            module.expert_bytes = self.store.topology.expert_bytes  # for topology_of: the parameters are gone
            form, key = layer_class(item.kind), (item.kind, layout)
            if key not in shared:
                shared[key] = form.prepare(module, layout)
            place = Place(index, self.engine, self.arena, layout, self.steps)
            layers.setdefault(item.name, []).append(form.attach(module, place, shared[key]))
        first: Any = model.get_submodule(next(iter(layers)))
        for name, several in layers.items():
            if len(several) > 1:
                module = model.get_submodule(name)
                module.foregate = LoopedLayers(several)
                if module is not first:
                    self._hooks.append(first.register_forward_pre_hook(module.foregate.reset))
        self.steps.attach(text_model(model))

    def _mode(self) -> tuple[str, str]:
        if self.config.mode == "off" or self.config.predictor is None:
            return "off", "no predictor" if self.config.predictor is None else "switched off by the user"
        if self.predictor is not None and self.predictor.error is not None:
            return "off", f"the predictor failed: {self.predictor.error}"
        if self.config.mode != "auto":
            return self.config.mode, "set by the user"
        guard = self.engine.guard
        assert guard is not None
        return ("enforce" if guard.acting else "off"), guard.reason


def _close_in_background(opened: ExitStack) -> None:
    """Close from a thread of its own: garbage is collected in any thread, the workers that would be joined included."""
    threading.Thread(target=opened.close, name="foregate-close").start()
