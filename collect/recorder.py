"""Recording routing where the top-k decision is used: hooks on the experts modules. Knows models, no files or texts.

Threads: hooks run in the thread that runs the forward; take() is for the same thread. Nothing of the model is changed:
the hooks are PyTorch's, before an experts module's call or after its router's, whichever has the ids (`kinds`), and
leave with the `with` block, also after an error.
Resident and offloaded models record alike: the ids are seen before any expert's weights are needed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from itertools import pairwise
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from .architectures import MoeModule, find_moe_modules, left_as_they_are
from .errors import ModelError
from .gates import find_gates
from .kinds import kind_named
from .selection import SelectionWatch, wrongly_chosen
from .topology import MoeTopology

log = logging.getLogger(__name__)

Note = Callable[[Sequence[Any]], None]

# N rows of a call (tokens, padding included), k top-k, E experts


class LayerRouting(NamedTuple):
    """Hold what one MoE layer's experts were called with."""

    experts: np.ndarray
    """int16 [N, k], router order, all calls one after the other; -1 = dropped or skipped."""
    weights: np.ndarray
    """float32 [N, k]; 0 where dropped."""
    calls: tuple[int, ...]
    """Rows of each call."""
    scores: np.ndarray | None = None
    """float32 [N, E], what the router's top-k chose from; None where not recorded."""
    hidden: np.ndarray | None = None
    """float16 [N, H], what the router's gate saw; None where not recorded."""

    def by_call(self) -> list[tuple[np.ndarray | None, ...]]:
        """Split into one (experts, weights, scores, hidden) per call, as views."""
        bounds = np.cumsum([0, *self.calls]).tolist()
        return [
            tuple(
                None if part is None else part[a:b] for part in (self.experts, self.weights, self.scores, self.hidden)
            )
            for a, b in pairwise(bounds)
        ]


class NoScoresError(ModelError):
    """Router scores were asked for of a model whose ids come from no top-k and no single argmax."""


class _Call(NamedTuple):
    """Hold one call of an experts module, on the model's device."""

    ids: torch.Tensor
    weights: torch.Tensor
    scores: torch.Tensor | None
    hidden: torch.Tensor | None


class RoutingRecorder:
    """Record the routing of every forward of a model.

        with RoutingRecorder(model) as recorder:
            model(**batch)
            routing = recorder.take()       # one LayerRouting per MoE layer

    Args:
        model: a transformers model; only its experts modules are touched.
        scores: record what each router's top-k chose from, too.
        hidden: record the hidden states that the routers' gates saw, too: 2 bytes x hidden size a token and layer.

    Raises:
        ModelError: if the model has no MoE layers that can be recorded, or a router without a gate where hidden states
            are asked for.
    """

    def __init__(self, model: nn.Module, *, scores: bool = False, hidden: bool = False) -> None:
        self.modules: list[MoeModule] = find_moe_modules(model)
        self.topology = MoeTopology(layers=tuple(item.layer for item in self.modules))
        self._model = model
        self._handles: list[RemovableHandle] = []
        self._calls: list[list[_Call]] = [[] for _ in self.modules]
        self._turns: dict[str, int] = {}  # of looped modules: calls in this forward
        self._watch = SelectionWatch() if scores else None
        self._gates = [gate.name for gate in find_gates(model, self.modules)] if hidden else []
        self._seen: dict[str, torch.Tensor] = {}  # by gate: its last input, until the experts are called
        if log.isEnabledFor(logging.INFO):  # looking takes 5 ms
            for name in left_as_they_are(model):
                log.info("%s is not recorded: text does not pass it", name)

    def __enter__(self) -> RoutingRecorder:
        assert not self._handles, "this recorder is recording already"
        for name in dict.fromkeys(self._gates):
            gate = self._model.get_submodule(name)
            self._handles.append(gate.register_forward_pre_hook(_on_call(self._see(name)), with_kwargs=True))
        for name in dict.fromkeys(item.name for item in self.modules):
            module = self._model.get_submodule(name)
            layers = [index for index, item in enumerate(self.modules) if item.name == name]
            router = kind_named(self.modules[layers[0]].kind).router(module)
            note = self._note(layers, module)
            if router is None:
                self._handles.append(module.register_forward_pre_hook(_on_call(note), with_kwargs=True))
            else:
                self._handles.append(router.register_forward_hook(_on_output(note)))
        if self._watch is not None:
            self._watch.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._watch is not None and self._handles:
            self._watch.__exit__(kind, error, traceback)
        while self._handles:
            self._handles.pop().remove()
        self.clear()

    def clear(self) -> None:
        """Forget what was recorded since the last take()."""
        self._turns.clear()
        self._seen.clear()
        for calls in self._calls:
            calls.clear()

    def take(self) -> list[LayerRouting]:
        """Give the routing since the last take(), one entry per MoE layer in topology order, and forget it.

        Raises:
            ModelError: if a layer's experts were not called at all, or recorded scores do not give the recorded ids.
        """
        silent = [item for item, calls in zip(self.modules, self._calls, strict=True) if not calls]
        if silent:
            index = self.modules.index(silent[0])
            self.clear()
            raise ModelError(
                f"MoE layer {index} ({silent[0].name}) recorded nothing, like {len(silent)} of {len(self.modules)} "
                "layers in all; run a whole forward of the model before taking its routing."
            )
        try:
            return [self._layer_routing(index) for index in range(len(self.modules))]
        finally:
            self.clear()

    def _see(self, name: str) -> Note:
        """Give what keeps a gate's input: float16, copied, so that a later change in place does not reach it."""

        def see(values: Sequence[Any]) -> None:
            self._seen[name] = values[0].detach().flatten(0, -2).to(torch.float16, copy=True)

        return see

    def _hidden(self, layer: int, num_rows: int) -> torch.Tensor | None:
        """Give what the layer's gate saw before this call of its experts."""
        if not self._gates:
            return None
        hidden = self._seen.pop(self._gates[layer], None)
        if hidden is None or len(hidden) != num_rows:
            raise ModelError(
                f"The gate of MoE layer {layer} ({self._gates[layer]}) saw {0 if hidden is None else len(hidden)} rows "
                f"before its experts were called with {num_rows}; record this model without hidden states."
            )
        return hidden

    def _note(self, layers: list[int], experts: nn.Module) -> Note:
        """Give what notes the calls of a module; a looped one has a layer for each call of a forward, in turn."""
        item = self.modules[layers[0]]
        kind = kind_named(item.kind)

        def note(values: Sequence[Any]) -> None:
            turn = 0
            if layers[0] == 0 and item.num_calls == 1:
                self._turns.clear()  # a forward begins, also after one that an error ended inside of a loop
            if item.num_calls > 1:
                turn = self._turns.get(item.name, 0)
                self._turns[item.name] = (turn + 1) % item.num_calls
            ids, weights = kind.routing(experts, values)
            if ids.shape != weights.shape or ids.shape[1] != item.layer.top_k:
                raise ModelError(
                    f"{item.name} was called with ids {tuple(ids.shape)} and weights {tuple(weights.shape)}, expected "
                    f"top-{item.layer.top_k}; this family cannot be recorded."
                )
            scores = None if self._watch is None else self._watch.scores_of(ids, item.layer.num_experts)
            hidden = self._hidden(layers[turn], len(ids))
            # copied, so that a later change in place does not reach the record; int16 halves what waits on a device
            self._calls[layers[turn]].append(
                _Call(ids.to(torch.int16, copy=True), weights.to(torch.float32, copy=True), scores, hidden)
            )

        return note

    def _layer_routing(self, index: int) -> LayerRouting:
        calls = self._calls[index]
        scores = [call.scores for call in calls if call.scores is not None]
        hidden = [call.hidden for call in calls if call.hidden is not None]
        if self._watch is not None:
            self._check(index, calls)
        return LayerRouting(
            _joined([call.ids for call in calls]),
            _joined([call.weights for call in calls]),
            tuple(len(call.ids) for call in calls),
            _joined(scores) if scores else None,
            _joined(hidden) if hidden else None,
        )

    def _check(self, index: int, calls: list[_Call]) -> None:
        """Hold ids to the scores that they came from."""
        where = f"MoE layer {index} ({self.modules[index].name})"
        for call in calls:
            if call.scores is None:
                raise NoScoresError(
                    f"{where} has no scores: its ids do not come from a top-k or an argmax (but from several, a table "
                    "of token ids or a kernel); record this model without scores."
                )
            wrong = wrongly_chosen(call.ids, call.scores)
            if wrong.any():
                raise ModelError(
                    f"{where} recorded experts that are not those with the largest scores in {int(wrong.sum())} of "
                    f"{len(wrong)} rows; report this model, its recording cannot be trusted."
                )


def _joined(parts: list[torch.Tensor]) -> np.ndarray:
    """Put calls one after the other; the record of a single call is not copied once more."""
    return (torch.cat(parts) if len(parts) > 1 else parts[0]).cpu().numpy()


def _on_call(note: Note) -> Any:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        note([*args, *kwargs.values()])  # argument names differ between families, their order does not

    return hook


def _on_output(note: Note) -> Any:
    def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        note(output if isinstance(output, tuple) else (output,))

    return hook
