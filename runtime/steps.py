"""Steps of a running model: which tokens a forward brings, and what the routers chose. Feeds the predictor thread.

A step is one forward of one stack. The predictor of the token horizon needs, for each token, the routing of the token
before it; that is known only when the step is over, so a step's tokens after its first are handed over with the next
step. Hooks sit on the stack's own module and can be taken back.

Threads: any may run the model; each has a present step of its own, and a lock guards the counts. Forwards that run at
the same time mix their tokens in the one predictor, which costs forecasts and never correctness.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from ..collect.topology import MoeTopology, Stack
from .counters import Counters
from .forecast import Forecast
from .predictor_thread import BatchInput, PredictorThread, TokenInput


class _Present(threading.local):
    """The present step of a thread."""

    step = 0
    asked = False
    """Whether the step gets a forecast."""
    ids: np.ndarray | None = None
    """Its token ids [B, T], where the next step may go on from them."""

    def __init__(self) -> None:
        self.routing: dict[int, np.ndarray] = {}


class StepTracker:
    """Follow the forwards of a model and keep the forecast of the present step.

    Args:
        counters: where steps, tokens and forecasts are counted.
        predictor: what is fed; None counts only.
        wanted: says, step by step, whether a forecast is worth its time; afterwards the predictor starts afresh.
    """

    def __init__(
        self,
        topology: MoeTopology,
        counters: Counters,
        predictor: PredictorThread | None,
        wanted: Callable[[], bool] = lambda: True,
    ) -> None:
        self.topology, self.counters, self.predictor = topology, counters, predictor
        self.acting = True  # whether forecasts are handed to the engine; observing scores them only
        self._wanted = wanted
        self._served = predictor.spec.layers if predictor else []
        self._first_layers = {topology.layers_of(stack)[0] for stack in topology.stacks}
        self._numbers = itertools.count(1)
        self._present = _Present()
        self._counting = threading.Lock()
        self._hooks: list[Any] = []

    def attach(self, model: nn.Module) -> None:
        """Hook the stacks of a model."""
        for stack in self.topology.stacks:
            module = model if stack == "causal" else getattr(model, f"get_{stack}")()
            self._hooks.append(module.register_forward_pre_hook(self._hook(stack), with_kwargs=True))

    def detach(self) -> None:
        """Take the hooks back."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def begin(self, stack: Stack, ids_BT: np.ndarray | None, mask_BT: np.ndarray | None, fresh: bool) -> None:
        """Start a step: hand the predictor what it may know by now."""
        present = self._present
        present.step = next(self._numbers)
        with self._counting:
            self.counters.steps += 1
        predictor = self.predictor
        if predictor is None or predictor.spec.stack != stack:
            return
        before, routing = present.ids, present.routing
        present.ids, present.routing = None, {}
        present.asked = ids_BT is not None and predictor.error is None and self._wanted()
        if ids_BT is None or not present.asked:  # from embeddings there is nothing to predict from
            return
        present.ids = ids_BT
        if predictor.spec.horizon == "batch":
            mask = np.ones(ids_BT.shape, bool) if mask_BT is None else mask_BT.astype(bool)
            predictor.submit(BatchInput(present.step, ids_BT, mask))
        elif before is None or fresh or not self._continues(before, routing, ids_BT):
            predictor.submit(TokenInput(present.step, ids_BT[:, :1], None))
        else:
            tokens = np.concatenate([before[:, 1:], ids_BT[:, :1]], axis=1)
            predictor.submit(TokenInput(present.step, tokens, [routing[layer] for layer in self._served]))

    def routed(self, layer: int, ids: np.ndarray) -> Forecast | None:
        """Note the ids [T, K] that a layer's router chose; give the forecast of this step if it came in time."""
        if layer in self._first_layers:
            with self._counting:
                self.counters.tokens += len(ids)
        predictor, present = self.predictor, self._present
        if predictor is None or not present.asked or layer not in self._served:
            return None
        present.routing[layer] = ids
        forecast = predictor.latest()
        in_time = forecast is not None and forecast.step == present.step
        if layer == self._served[-1]:
            with self._counting:
                self.counters.forecasts += in_time
                self.counters.late_forecasts += not in_time
        if forecast is None or not in_time:
            return None
        self._score(layer, ids, forecast)
        return forecast if self.acting else None

    def _continues(self, before_BT: np.ndarray, routing: dict[int, np.ndarray], ids_BT: np.ndarray) -> bool:
        """Say whether the step before was complete and of the same batch."""
        if len(before_BT) != len(ids_BT):
            return False
        return all(len(routing.get(layer, ())) == before_BT.size for layer in self._served)

    def _score(self, layer: int, ids_TK: np.ndarray, forecast: Forecast) -> None:
        """Count how many of the needed experts are among as many of the forecast's largest."""
        start, stop = self.topology.offsets[layer], self.topology.offsets[layer + 1]
        needed = set(ids_TK[ids_TK >= 0].ravel().tolist())
        demand = forecast.demand[start:stop]
        if 0 < len(needed) < len(demand):
            largest = np.argpartition(-demand, len(needed) - 1)[: len(needed)]
            with self._counting:
                self.counters.named += len(needed)
                self.counters.named_right += len(needed.intersection(largest.tolist()))

    def _hook(self, stack: Stack) -> Any:
        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            ids = kwargs.get("input_ids", args[0] if args else None)
            mask = kwargs.get("attention_mask")
            fresh = not any(_cached_tokens(value) for value in (*args, *kwargs.values()))
            is_mask = isinstance(mask, torch.Tensor) and isinstance(ids, torch.Tensor) and mask.shape == ids.shape
            self.begin(
                stack,
                ids.numpy(force=True) if isinstance(ids, torch.Tensor) else None,
                mask.numpy(force=True) if is_mask else None,  # type: ignore[union-attr]
                fresh,
            )

        return before


def _cached_tokens(value: Any) -> int:
    """Give how many tokens a key-value cache holds, by whatever name a forward gets it; 0 for anything else."""
    return int(value.get_seq_length()) if hasattr(value, "get_seq_length") else 0
