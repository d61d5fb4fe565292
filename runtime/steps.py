"""Steps of a running model: which tokens a forward brings, and what the routers chose. Feeds the predictor thread.

A step is one forward of one stack. The predictor of the token horizon needs, for each token, the routing of the token
before it; that is known only when the step is over, so a step's tokens after its first are handed over with the next
step. Hooks sit on the stack's own module and can be taken back.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

from ..collect.topology import MoeTopology, Stack
from .counters import Counters
from .forecast import Forecast
from .predictor_thread import BatchInput, PredictorThread, TokenInput


class StepTracker:
    """Follow the forwards of a model and keep the forecast of the present step."""

    def __init__(self, topology: MoeTopology, counters: Counters, predictor: PredictorThread | None) -> None:
        self.topology, self.counters, self.predictor = topology, counters, predictor
        self.step = 0
        self.acting = True  # whether forecasts are handed to the engine; observing scores them only
        self._served = predictor.spec.layers if predictor else []
        self._first_layers = {topology.layers_of(stack)[0] for stack in topology.stacks}
        self._ids: np.ndarray | None = None  # [B, T] of the present step of the served stack
        self._routing: dict[int, np.ndarray] = {}
        self._scored: int | None = None
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
        self.step += 1
        self.counters.steps += 1
        predictor = self.predictor
        if predictor is None or predictor.spec.stack != stack:
            return
        if ids_BT is None:  # a forward from embeddings: nothing to predict from
            self._ids, self._routing = None, {}
            return
        if predictor.spec.horizon == "batch":
            mask = np.ones(ids_BT.shape, bool) if mask_BT is None else mask_BT.astype(bool)
            predictor.submit(BatchInput(self.step, ids_BT, mask))
        elif fresh or not self._continues(ids_BT):
            predictor.submit(TokenInput(self.step, ids_BT[:, :1], None))
        else:
            assert self._ids is not None
            tokens = np.concatenate([self._ids[:, 1:], ids_BT[:, :1]], axis=1)
            predictor.submit(TokenInput(self.step, tokens, [self._routing[layer] for layer in self._served]))
        self._ids, self._routing = ids_BT, {}

    def routed(self, layer: int, ids: np.ndarray) -> Forecast | None:
        """Note the ids [T, K] that a layer's router chose; give the forecast of this step if it came in time."""
        if layer in self._first_layers:
            self.counters.tokens += len(ids)
        predictor = self.predictor
        if predictor is None or layer not in self._served:
            return None
        self._routing[layer] = ids
        forecast = predictor.latest()
        in_time = forecast is not None and forecast.step == self.step
        if layer == self._served[-1]:
            self.counters.forecasts += in_time
            self.counters.late_forecasts += not in_time
        if forecast is None or not in_time:
            return None
        self._score(layer, ids, forecast)
        return forecast if self.acting else None

    def _continues(self, ids_BT: np.ndarray) -> bool:
        """Say whether the last step was complete and of the same batch."""
        if self._ids is None or len(self._ids) != len(ids_BT):
            return False
        return all(len(self._routing.get(layer, ())) == self._ids.size for layer in self._served)

    def _score(self, layer: int, ids_TK: np.ndarray, forecast: Forecast) -> None:
        """Count how many of the needed experts are among as many of the forecast's largest."""
        start, stop = self.topology.offsets[layer], self.topology.offsets[layer + 1]
        needed = set(ids_TK[ids_TK >= 0].ravel().tolist())
        demand = forecast.demand[start:stop]
        if 0 < len(needed) < len(demand):
            largest = np.argpartition(-demand, len(needed) - 1)[: len(needed)]
            self.counters.named += len(needed)
            self.counters.named_right += len(needed.intersection(largest.tolist()))

    def _hook(self, stack: Stack) -> Any:
        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            ids = kwargs.get("input_ids", args[0] if args else None)
            mask = kwargs.get("attention_mask")
            past = kwargs.get("past_key_values")
            fresh = past is None or past.get_seq_length() == 0
            is_mask = isinstance(mask, torch.Tensor) and isinstance(ids, torch.Tensor) and mask.shape == ids.shape
            self.begin(
                stack,
                ids.numpy(force=True) if isinstance(ids, torch.Tensor) else None,
                mask.numpy(force=True) if is_mask else None,  # type: ignore[union-attr]
                fresh,
            )

        return before
