"""Layers that compute from slots: the resident layer's bits, in whatever order experts arrive."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from foregate.collect import tiny_models
from foregate.collect.architectures import expert_tensors, find_moe_modules, topology_of
from foregate.collect.errors import ModelError
from foregate.collect.kinds import kind_named
from foregate.collect.topology import MoeTopology
from foregate.runtime.blocks import BlockLayout, fill, layout_of
from foregate.runtime.forecast import Forecast
from foregate.runtime.layers import IMPLEMENTATION, LAYERS, Place
from foregate.runtime.layers.fused import _groups, fused_forward
from foregate.runtime.slots import SlotArena
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward


class Shuffled:
    """An engine that has every expert in some slot and serves them in random order."""

    def __init__(self, topology: MoeTopology, layer: int, slots: Sequence[int], seed: int) -> None:
        self.topology, self.layer, self.slots, self.random = topology, layer, slots, Random(seed)
        self.calls: list[tuple[list[int], bool]] = []

    @contextmanager
    def acquire(
        self, layer: int, needed: Sequence[int], *, one_token: bool, forecast: Forecast | None = None
    ) -> Iterator[Iterator[tuple[int, int]]]:
        assert layer == self.layer
        assert list(needed) == sorted(set(needed))
        self.calls.append((list(needed), one_token))
        offset = self.topology.offsets[layer]
        served = [(expert, self.slots[expert - offset]) for expert in needed]
        self.random.shuffle(served)
        yield iter(served)


class Heard:
    """A router's listener."""

    def __init__(self) -> None:
        self.ids: list[np.ndarray] = []

    def routed(self, layer: int, ids: np.ndarray) -> None:
        self.ids.append(ids)


def in_slots(module: Any, kind: str, seed: int) -> tuple[SlotArena, BlockLayout, list[int]]:
    """Put every expert of a module into a random slot of an arena."""
    layout = layout_of(expert_tensors(module, kind, 0))
    slots = list(range(kind_named(kind).num_experts(module)))
    Random(seed).shuffle(slots)
    arena = SlotArena(len(slots), layout.nbytes)
    for expert, slot in enumerate(slots):
        fill(arena.buffer(slot)[: layout.nbytes], layout, expert_tensors(module, kind, expert))
    return arena, layout, slots


def fused(name: str, dtype: torch.dtype, layer: int = 1) -> tuple[Any, Shuffled, Heard]:
    """Give a resident experts module that computes from slots where it is asked to through `foregate`."""
    model = tiny_models.build(name).to(dtype)
    module: Any = model.get_submodule(find_moe_modules(model)[layer].name)
    arena, layout, slots = in_slots(module, "fused", seed=1)
    engine, heard = Shuffled(topology_of(model), layer, slots, seed=2), Heard()
    place = Place(layer, engine, arena, layout, heard)  # type: ignore[arg-type]
    form = LAYERS["fused"]
    module.foregate = form(place, module, form.prepare(module, layout))
    return module, engine, heard


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "granitemoe"])
def test_fused_layers_have_the_resident_bits_in_any_order_of_arrival(name: str, dtype: torch.dtype) -> None:
    module, engine, heard = fused(name, dtype)
    generator = torch.Generator().manual_seed(5)
    for num_tokens in (1, 2, 9, 33):
        hidden_TH = torch.randn(num_tokens, 32, generator=generator).to(dtype)
        ids_TK = torch.stack([torch.randperm(8, generator=generator)[:3] for _ in range(num_tokens)])
        weights_TK = torch.rand(num_tokens, 3, generator=generator).to(dtype)
        expected = grouped_mm_experts_forward(module, hidden_TH, ids_TK, weights_TK)
        for _ in range(3):
            assert torch.equal(fused_forward(module, hidden_TH, ids_TK, weights_TK), expected)
        needed, one_token = engine.calls[-1]
        assert needed == [8 + expert for expert in sorted(set(ids_TK.ravel().tolist()))]
        assert one_token == (num_tokens == 1)
        assert heard.ids[-1].tolist() == ids_TK.tolist()


def test_router_weights_may_be_of_another_dtype() -> None:
    module, _, _ = fused("qwen3_moe", torch.bfloat16)
    hidden_TH = torch.randn(4, 32).bfloat16()
    ids_TK, weights_TK = torch.tensor([[0, 1, 2]] * 4), torch.rand(4, 3)
    expected = grouped_mm_experts_forward(module, hidden_TH, ids_TK, weights_TK)
    assert torch.equal(fused_forward(module, hidden_TH, ids_TK, weights_TK), expected)


def test_no_tokens_need_no_experts() -> None:
    module, engine, _ = fused("qwen3_moe", torch.float32)
    out = fused_forward(module, torch.empty(0, 32), torch.empty(0, 3, dtype=torch.int64), torch.empty(0, 3))
    assert out.shape == (0, 32)
    assert not engine.calls


def test_gradients_are_refused_where_they_are_asked_for() -> None:
    module, _, _ = fused("qwen3_moe", torch.float32)
    hidden_TH = torch.randn(2, 32, requires_grad=True)
    args = (torch.tensor([[0, 1, 2]] * 2), torch.rand(2, 3))
    out = fused_forward(module, hidden_TH, *args)
    assert torch.equal(out, grouped_mm_experts_forward(module, hidden_TH, *args))
    with pytest.raises(ModelError, match="Offloaded experts have no gradients"):
        (out + hidden_TH).sum().backward()
    with torch.no_grad():
        assert not fused_forward(module, hidden_TH, *args).requires_grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_switch_layers_have_the_resident_bits_and_drop_what_the_router_drops(dtype: torch.dtype) -> None:
    model = tiny_models.build("switch_transformers").to(dtype)
    layer = 3
    module: Any = model.get_submodule(find_moe_modules(model)[layer].name)
    arena, layout, slots = in_slots(module, "switch", seed=1)
    engine, heard = Shuffled(topology_of(model), layer, slots, seed=2), Heard()
    stand_in: Any = LAYERS["switch"].empty(module)
    LAYERS["switch"].attach(stand_in, Place(layer, engine, arena, layout, heard), None)  # type: ignore[arg-type]
    assert not list(stand_in.parameters())
    resident = tiny_models.build("switch_transformers").to(dtype).get_submodule(find_moe_modules(model)[layer].name)
    generator = torch.Generator().manual_seed(5)
    for num_tokens in (1, 2, 9, 33):
        hidden_TH = torch.randn(num_tokens, 32, generator=generator).to(dtype)
        chosen_T = torch.randint(-1, 8, (num_tokens,), generator=generator)
        mask_T1E = torch.zeros(num_tokens, 1, 8, dtype=torch.int64)
        for token, expert in enumerate(chosen_T.tolist()):
            if expert >= 0:
                mask_T1E[token, 0, expert] = 1
        weights_T1 = torch.rand(num_tokens, 1, generator=generator).to(dtype)
        expected = resident(hidden_TH, mask_T1E, weights_T1)
        assert torch.equal(stand_in(hidden_TH, mask_T1E, weights_T1), expected)
        assert not expected[chosen_T < 0].any()
        assert heard.ids[-1].ravel().tolist() == chosen_T.tolist()
    calls = len(engine.calls)
    assert not stand_in(torch.randn(3, 32).to(dtype), torch.zeros(3, 1, 8), torch.ones(3, 1).to(dtype)).any()
    assert len(engine.calls) == calls, "all tokens dropped: no event"
    assert heard.ids[-1].tolist() == [[-1]] * 3


def test_groups_are_the_runs_of_sorted_ids() -> None:
    assert _groups(torch.tensor([0, 0, 2, 5, 5, 5])) == {0: slice(0, 2), 2: slice(2, 3), 5: slice(3, 6)}
    assert _groups(torch.empty(0)) == {}


def test_transformers_knows_the_implementation() -> None:
    assert ALL_EXPERTS_FUNCTIONS[IMPLEMENTATION] is fused_forward
