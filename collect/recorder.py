"""Recording routing where the top-k decision is used: hooks on the experts modules. Knows models, no files or texts.

Threads: hooks run in the thread that runs the forward; take() is for the same thread. Nothing of the model is changed:
the hooks are PyTorch's, before an experts module's call or after its router's, whichever has the ids (`kinds`), and
leave with the `with` block, also after an error.
Resident and offloaded models record alike: the ids are seen before any expert's weights are needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from .architectures import MoeModule, find_moe_modules
from .errors import ModelError
from .kinds import kind_named
from .topology import MoeTopology

Note = Callable[[Sequence[Any]], None]

# N rows of a call (tokens, padding included), k top-k, E experts


class LayerRouting(NamedTuple):
    """Hold what one MoE layer's experts were called with."""

    experts: np.ndarray
    """int16 [N, k], router order, all calls one after the other; -1 = dropped by capacity."""
    weights: np.ndarray
    """float32 [N, k]; 0 where dropped."""
    calls: tuple[int, ...]
    """Rows of each call."""

    def by_call(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Split into one (experts, weights) pair per call, as views."""
        bounds = np.cumsum([0, *self.calls]).tolist()
        return [(self.experts[a:b], self.weights[a:b]) for a, b in pairwise(bounds)]


class RoutingRecorder:
    """Record the routing of every forward of a model.

        with RoutingRecorder(model) as recorder:
            model(**batch)
            routing = recorder.take()       # one LayerRouting per MoE layer

    Args:
        model: a transformers model; only its experts modules are touched.

    Raises:
        ModelError: if the model has no MoE layers that can be recorded.
    """

    def __init__(self, model: nn.Module) -> None:
        self.modules: list[MoeModule] = find_moe_modules(model)
        self.topology = MoeTopology(layers=tuple(item.layer for item in self.modules))
        self._model = model
        self._handles: list[RemovableHandle] = []
        self._calls: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in self.modules]

    def __enter__(self) -> RoutingRecorder:
        assert not self._handles, "this recorder is recording already"
        for index, item in enumerate(self.modules):
            module = self._model.get_submodule(item.name)
            router = kind_named(item.kind).router(module)
            note = self._note(index, module)
            if router is None:
                self._handles.append(module.register_forward_pre_hook(_on_call(note), with_kwargs=True))
            else:
                self._handles.append(router.register_forward_hook(_on_output(note)))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        while self._handles:
            self._handles.pop().remove()
        self.clear()

    def clear(self) -> None:
        """Forget what was recorded since the last take()."""
        for calls in self._calls:
            calls.clear()

    def take(self) -> list[LayerRouting]:
        """Give the routing since the last take(), one entry per MoE layer in topology order, and forget it.

        Raises:
            ModelError: if a layer's experts were not called at all.
        """
        silent = [item for item, calls in zip(self.modules, self._calls, strict=True) if not calls]
        if silent:
            index = self.modules.index(silent[0])
            self.clear()
            raise ModelError(
                f"MoE layer {index} ({silent[0].name}) recorded nothing, like {len(silent)} of {len(self.modules)} "
                "layers in all; run a whole forward of the model before taking its routing."
            )
        routing = [_layer_routing(calls) for calls in self._calls]
        self.clear()
        return routing

    def _note(self, index: int, experts: nn.Module) -> Note:
        item, calls = self.modules[index], self._calls[index]
        kind = kind_named(item.kind)

        def note(values: Sequence[Any]) -> None:
            ids, weights = kind.routing(experts, values)
            if ids.shape != weights.shape or ids.shape[1] != item.layer.top_k:
                raise ModelError(
                    f"{item.name} was called with ids {tuple(ids.shape)} and weights {tuple(weights.shape)}, expected "
                    f"top-{item.layer.top_k}; this family cannot be recorded."
                )
            # copied, so that a later change in place does not reach the record; int16 halves what waits on a device
            calls.append((ids.to(torch.int16, copy=True), weights.to(torch.float32, copy=True)))

        return note


def _on_call(note: Note) -> Any:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        note([*args, *kwargs.values()])  # argument names differ between families, their order does not

    return hook


def _on_output(note: Note) -> Any:
    def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        note(output if isinstance(output, tuple) else (output,))

    return hook


def _layer_routing(calls: list[tuple[torch.Tensor, torch.Tensor]]) -> LayerRouting:
    experts = torch.cat([ids for ids, _ in calls]).cpu().numpy()
    weights = torch.cat([weights for _, weights in calls]).cpu().numpy()
    return LayerRouting(experts, weights, tuple(len(ids) for ids, _ in calls))
