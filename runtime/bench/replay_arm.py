"""One way of serving a replay: an engine, or everything resident, driven by recorded routing with real products.

A token goes through the layers of its trace; in each, the experts that it used are multiplied with the layer's input as
they become available, and summed in the router's order. Arms differ in which experts are resident when, never in what
they compute. Knows engines and rows of traces; knows no stores or checkpoints.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import NamedTuple, Protocol

import numpy as np
import torch

from ...collect.topology import MoeTopology, Stack
from ..blocks import BlockLayout
from ..clock import Clock
from ..engine import ExpertEngine
from ..forecast import Forecast
from ..kernels import loop_product
from ..slots import SlotArena


class Token(NamedTuple):
    """One token of a replay."""

    token_id: int
    """Its id, -1 where the trace has none."""
    experts: np.ndarray
    """int [L, K], ids of experts by layer, -1 for none."""
    first: bool
    """Whether it starts a sequence."""


class Steps(Protocol):
    """What tells forecasts: `StepTracker`, or one that knows the future."""

    def begin(self, stack: Stack, ids_BT: np.ndarray | None, mask_BT: np.ndarray | None, fresh: bool) -> None:
        """Start a step."""
        ...

    def routed(self, layer: int, ids: np.ndarray) -> Forecast | None:
        """Note what a layer's router chose and give the step's forecast."""
        ...


class Foreknown:
    """Tell of each step what the trace has: every expert that it uses, and no other."""

    def __init__(self, topology: MoeTopology, tokens: Sequence[Token]) -> None:
        self._topology, self._tokens, self._step = topology, tokens, -1
        self._forecast: Forecast | None = None

    def begin(self, stack: Stack, ids_BT: np.ndarray | None, mask_BT: np.ndarray | None, fresh: bool) -> None:
        """Go on to the next token."""
        self._step += 1
        demand = np.zeros(self._topology.num_experts, np.float32)
        demand[[expert for needed in needed_of(self._tokens[self._step], self._topology) for expert in needed]] = 1
        self._forecast = Forecast(self._step, demand)

    def routed(self, layer: int, ids: np.ndarray) -> Forecast | None:
        """Give the step's forecast."""
        return self._forecast


class ReplayArm:
    """Run tokens through one engine, or through an arena that holds everything.

    Args:
        engine: serves experts; None where the arena holds expert e in slot e.
        steps: tells forecasts; None without any.
    """

    def __init__(
        self,
        topology: MoeTopology,
        arena: SlotArena,
        layout: BlockLayout,
        clock: Clock,
        *,
        engine: ExpertEngine | None = None,
        steps: Steps | None = None,
    ) -> None:
        self.topology, self.arena, self.layout, self.clock = topology, arena, layout, clock
        self.engine, self.steps = engine, steps
        self.seconds: list[float] = []
        """Of each round."""
        self.digest = hashlib.blake2b(digest_size=16)
        """Of all tokens' outputs."""
        hidden = layout.tensors[1].shape[0]
        self._start = torch.randn(1, hidden, generator=torch.Generator().manual_seed(1))

    def run(self, tokens: Sequence[Token]) -> float:
        """Serve tokens one after another and give the seconds that they took."""
        start = self.clock.now()
        with torch.inference_mode():
            for token in tokens:
                self.digest.update(self._token(token).numpy().tobytes())
        return self.clock.now() - start

    def load_everything(self) -> None:
        """Let the engine read every expert once, layer by layer."""
        assert self.engine is not None
        for layer, (start, stop) in enumerate(pairwise(self.topology.offsets)):
            with self.engine.acquire(layer, range(start, stop), one_token=False) as served:
                for _ in served:
                    pass

    def _token(self, token: Token) -> torch.Tensor:
        if self.steps is not None:
            self.steps.begin("causal", np.array([[token.token_id]]), None, token.first)
        x = self._start * (1 + 0.01 * (token.token_id % 97))
        for layer, needed in enumerate(needed_of(token, self.topology)):
            forecast = None if self.steps is None else self.steps.routed(layer, token.experts[layer][None])
            if not needed:
                continue
            outs: dict[int, torch.Tensor] = {}
            with self._served(layer, needed, forecast) as served:
                for expert, slot in served:
                    outs[expert] = self._expert(x, slot)
            offset = self.topology.offsets[layer]
            ranked = [offset + int(expert) for expert in token.experts[layer] if expert >= 0]
            added = sum((outs[expert] for expert in ranked[1:]), outs[ranked[0]])
            x = torch.nn.functional.rms_norm(x + added / len(ranked), x.shape[1:])
        return x

    @contextmanager
    def _served(
        self, layer: int, needed: tuple[int, ...], forecast: Forecast | None
    ) -> Iterator[Iterator[tuple[int, int]]]:
        if self.engine is None:
            yield ((expert, expert) for expert in needed)
            return
        with self.engine.acquire(layer, needed, one_token=True, forecast=forecast) as served:
            yield served

    def _expert(self, x: torch.Tensor, slot: int) -> torch.Tensor:
        tensors = self.arena.tensors(slot, self.layout)
        gate, up = loop_product(x, tensors["gate_up_proj"], False).chunk(2, dim=-1)
        return loop_product(torch.nn.functional.silu(gate) * up, tensors["down_proj"], False)


def needed_of(token: Token, topology: MoeTopology) -> list[tuple[int, ...]]:
    """Give the flat experts that each layer needs for a token, ascending."""
    offsets = topology.offsets
    return [
        tuple(sorted({offsets[layer] + int(expert) for expert in token.experts[layer] if expert >= 0}))
        for layer in range(topology.num_layers)
    ]


def counts_of(engine: ExpertEngine) -> Mapping[str, float]:
    """Give what an engine counted."""
    counters = engine.counters
    names = ("hits", "delayed_hits", "misses", "prefetches", "on_time", "wasted", "stall_s", "forecasts")
    return {name: getattr(counters, name) for name in names}
