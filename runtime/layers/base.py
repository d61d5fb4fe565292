"""What computes one MoE layer of an offloaded model: the resident layer's own arithmetic, expert by expert, from slots.

A layer class stands for one kind of experts module (`collect/kinds`). It says what is left of the module when its
experts are in a store, and computes its forward in the order of summation of the resident one, so that the result has
its bits whatever the order in which experts arrive.
Shapes: T tokens, K top-k, H hidden size, E experts, M rows of one expert.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol, Self

import numpy as np
import torch
from torch import nn

from ...collect.errors import ModelError
from ...collect.kinds import kind_named
from ..blocks import BlockLayout
from ..engine import ExpertEngine
from ..forecast import Forecast
from ..slots import SlotArena
from .probe import check_layer


class Listener(Protocol):
    """Hear what a layer's router chose, and give the forecast in force."""

    def routed(self, layer: int, ids: np.ndarray) -> Forecast | None:
        """Take the ids [T, K] (-1 = dropped) of a layer."""
        ...


class Place(NamedTuple):
    """Say what a layer is served by."""

    layer: int
    """MoE-layer index."""
    engine: ExpertEngine
    arena: SlotArena
    layout: BlockLayout
    """Layout of its blocks."""
    listener: Listener


class OffloadedLayer(ABC):
    """Serve one MoE layer from slots.

    Args:
        place: what it is served by.
        module: what `empty` left of the experts module.
        shared: what `prepare` gave for layers of this layout.
    """

    kind: ClassVar[str]
    """Key of its counterpart in `collect.kinds.KINDS`."""
    PROBED: ClassVar[int] = 2
    """Random experts of a probe; 1 stands for all."""

    def __init__(self, place: Place, module: Any, shared: Any = None) -> None:
        self.layer, self.engine, self.arena, self.layout, self.listener = place
        self.offset = self.engine.topology.offsets[self.layer]

    @classmethod
    def empty(cls, module: nn.Module) -> nn.Module:
        """Take the experts' parameters out of a module and give what takes its place: by default a `StandIn`."""
        kind = kind_named(cls.kind)
        num_experts = kind.num_experts(module)
        drop_parameters(module, kind.stored(module))
        return StandIn(cls.kind, num_experts, module)

    @classmethod
    def make_exact(cls, module: Any) -> None:
        """Set a resident module to what this layer is bit-equal to, where the model leaves a choice."""
        return

    @classmethod
    def prepare(cls, module: Any, layout: BlockLayout) -> Any:
        """Find out, once for all layers of a layout, which computation gives the resident layer's bits.

        Raises:
            ModelError: if none does.
        """
        shared = cls.choose(module, layout)
        check_layer(cls, module, layout, shared)
        return shared

    @classmethod
    def choose(cls, module: Any, layout: BlockLayout) -> Any:
        """Choose what layers of a layout have in common, as a kernel; by default nothing."""
        return None

    @classmethod
    def joined(cls, module: Any, blocks: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """Make the resident module's parameters out of those of a probe's experts, by default as stacks."""
        return {name: torch.stack([block[name] for block in blocks]) for name in blocks[0]}

    @classmethod
    def probe(
        cls, module: Any, block: Mapping[str, torch.Tensor], tokens: int, generator: torch.Generator
    ) -> tuple[Any, ...] | None:
        """Give a call of the module in which the probe's experts alone are chosen; None compares nothing."""
        return None

    @classmethod
    def attach(cls, module: Any, place: Place, shared: Any) -> Self:
        """Let a module that `empty` left compute from slots."""
        layer = cls(place, module, shared)
        module.foregate = layer
        return layer

    @abstractmethod
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the layer, with the arguments and the result of the resident module's forward."""

    def run(self, *args: Any) -> Any:
        """Compute the layer as part of a model that may be tracking gradients."""
        return outside_autograd(self.forward, *args)

    def acquire(self, ids_TK: torch.Tensor, experts: Iterable[int]) -> Any:
        """Report what the router chose and serve these experts, each as (expert, tensors by name).

        Use it as a context manager that gives an iterator; tensors are valid until the iterator is advanced.
        """
        ids = ids_TK.numpy(force=True)
        forecast = self.listener.routed(self.layer, ids)
        return _Served(self, sorted(experts), len(ids) == 1, forecast)


class _Served:
    """Turn flat indices and slots of an event into expert ids and tensors; an event without experts is none."""

    def __init__(self, layer: OffloadedLayer, experts: list[int], one_token: bool, forecast: Forecast | None) -> None:
        self.layer, self.event = layer, None
        if experts:
            needed = [layer.offset + expert for expert in experts]
            self.event = layer.engine.acquire(layer.layer, needed, one_token=one_token, forecast=forecast)

    def __enter__(self) -> Iterable[tuple[int, dict[str, torch.Tensor]]]:
        if self.event is None:
            return iter(())
        layer, served = self.layer, self.event.__enter__()
        return ((flat - layer.offset, layer.arena.tensors(slot, layer.layout)) for flat, slot in served)

    def __exit__(self, *error: Any) -> bool | None:
        return None if self.event is None else self.event.__exit__(*error)


class StandIn(nn.Module):
    """Take the place of an experts module whose experts live in a store; `attach` a layer before use.

    Whatever the module holds beside its experts stays reachable by its name. The emptied module itself is kept, for
    its settings and functions, in a tuple: as a sub-module it would be one more module that holds them.
    """

    def __init__(self, kind: str, num_experts: int, module: nn.Module) -> None:
        super().__init__()
        self.foregate_kind, self.num_experts = kind, num_experts
        self.foregate: OffloadedLayer | None = None
        self.emptied = (module.eval(),)
        for name, parameter in module.named_parameters(recurse=False):
            self.register_parameter(name, parameter)
        for name, buffer in module.named_buffers(recurse=False):
            self.register_buffer(name, buffer, persistent=name not in module._non_persistent_buffers_set)
        for name, child in module.named_children():
            if any(True for _ in (*child.parameters(), *child.buffers())):
                self.add_module(name, child)

    def forward(self, hidden: torch.Tensor, *args: Any) -> Any:
        """Compute the layer from slots."""
        assert self.foregate is not None, "attached at load"
        return self.foregate.run(hidden, *args)


def drop_parameters(module: nn.Module, names: Iterable[str]) -> None:
    """Take parameters out of a module and its children, by name, without a trace."""
    for name in list(names):
        path, _, last = name.rpartition(".")
        del module.get_submodule(path)._parameters[last]


def outside_autograd(forward: Callable[..., torch.Tensor], hidden: torch.Tensor, *args: Any) -> torch.Tensor:
    """Compute experts outside of autograd, which would keep slots that change behind its back.

    Parameters of the model stay as they are: whether they require gradients decides which products PyTorch takes.
    """
    with torch.no_grad():
        out = forward(hidden, *args)
    if torch.is_grad_enabled() and hidden.requires_grad:
        out.requires_grad_().register_hook(_refuse_backward)
    return out


def _refuse_backward(grad: torch.Tensor) -> None:
    raise ModelError("Offloaded experts have no gradients; train the resident model and pack it afterwards.")
