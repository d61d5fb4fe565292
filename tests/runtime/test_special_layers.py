"""Families outside the experts interface: resident bits from any store, number of slots and order of arrival."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from foregate.collect import tiny_models
from foregate.collect.architectures import find_moe_modules, topology_of
from foregate.collect.errors import ModelError, SettingError
from foregate.collect.kinds import KINDS
from foregate.runtime import layers as registry
from foregate.runtime import load
from foregate.runtime.blocks import layout_of
from foregate.runtime.layers import LAYERS, Place, StandIn, layer_class, register_layer
from foregate.runtime.layers.base import drop_parameters
from foregate.runtime.layers.batched import BatchedKernel, copies_product
from foregate.runtime.layers.probe import graft
from foregate.runtime.layers.switch import SwitchLayer

from .test_layers import Heard, Shuffled, in_slots

Pack = Callable[..., Any]  # what the fixture `packed` gives

FAMILIES = {
    "switch": "switch_transformers",
    "nllb": "nllb_moe",
    "llama4": "llama4",
    "dbrx": "dbrx",
    "jetmoe": "jetmoe",
    "longcat": "longcat_flash",
    "step3p7": "step3p7",
}
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)  # put back after each test, as all that tests may change


def test_every_kind_has_a_layer_and_every_layer_a_kind() -> None:
    assert set(LAYERS) == set(KINDS) == {"fused", "zaya", *FAMILIES}
    assert all(layer.kind == kind for kind, layer in LAYERS.items())


def padded(pair: Any, num_rows: int, num_tokens: int) -> dict[str, torch.Tensor]:
    """Give prompts of which the first is shorter: padding on the left."""
    prompts = pair.prompts(num_rows, num_tokens, seed=2)
    if num_rows > 1:
        prompts["input_ids"][0, :4] = 0
        prompts["attention_mask"][0, :4] = 0
    return prompts


def generated(model: Any, prompts: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Generate six tokens and give them with every step's logits."""
    out = model.generate(
        **prompts,
        max_new_tokens=6,
        min_new_tokens=6,
        do_sample=False,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return out.sequences, *out.logits


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", FAMILIES)
def test_prefill_and_decode_have_the_resident_bits(packed: Pack, kind: str, dtype: torch.dtype) -> None:
    pair = packed(FAMILIES[kind], dtype)
    for slots in (max(2, pair.top_k), 8, 1.0):
        model = load(pair.store, slots=slots)
        with model.foregate as handle:
            for shape in ((1, 9), (3, 17)):
                prompts = padded(pair, *shape)
                found, expected = generated(model, prompts), generated(pair.resident, prompts)
                assert all(torch.equal(left, right) for left, right in zip(found, expected, strict=True))
                inputs = pair.inputs(*shape)
                for gradients in (False, True):
                    with torch.set_grad_enabled(gradients):
                        assert torch.equal(model(**inputs).logits, pair.resident(**inputs).logits)
            handle.engine.check()
            assert handle.damaged_slots() == []
            if slots == 1.0:
                assert handle.stats().misses <= pair.experts, "each expert is read once"
            elif kind != "nllb":
                assert handle.stats().misses > pair.experts, "the cache was smaller than what is needed"


@pytest.mark.parametrize("kind", FAMILIES)
def test_what_is_left_of_a_model_holds_no_expert(packed: Pack, kind: str) -> None:
    pair = packed(FAMILIES[kind])
    stored = {
        f"{item.name}.{name}"
        for item in find_moe_modules(pair.resident)
        for name in KINDS[kind].stored(pair.resident.get_submodule(item.name))
    }
    model = load(pair.store, slots=pair.least)
    with model.foregate:
        own, resident = dict(model.named_parameters()), dict(pair.resident.named_parameters())
        assert set(own) == set(resident) - stored
        assert all(torch.equal(parameter, resident[name]) for name, parameter in own.items())
        tensors = [*model.parameters(), *model.buffers()]
        assert all(tensor.device.type == "cpu" for tensor in tensors)
        assert set(model.state_dict()) == set(pair.resident.state_dict()) - stored
        assert topology_of(model) == topology_of(pair.resident)
        assert not any(parameter for item in find_moe_modules(model) for parameter in _hidden_parameters(model, item))


def _hidden_parameters(model: Any, item: Any) -> list[str]:
    """Name the experts' parameters that the emptied module, which is no sub-module, still has."""
    stand_in: Any = model.get_submodule(item.name)
    return list(KINDS[item.kind].stored(stand_in.emptied[0]))


@pytest.mark.parametrize("kind", FAMILIES)
def test_saving_and_training_are_refused(packed: Pack, kind: str, tmp_path: Any) -> None:
    pair = packed(FAMILIES[kind])
    model = load(pair.store, slots=pair.least)
    with model.foregate:
        with pytest.raises(ValueError, match="foregate and is not serializable"):
            model.save_pretrained(tmp_path / "copy")
        loss = model(**pair.inputs(1, 5)).logits.sum()
        with pytest.raises(ModelError, match="train the resident model"):
            loss.backward()


def calls_of(model: Any, name: str) -> list[tuple[tuple[Any, ...], Any]]:
    """Run a model on several sizes and give the arguments and results of one module's calls."""
    calls: list[tuple[tuple[Any, ...], Any]] = []
    hook = model.get_submodule(name).register_forward_hook(lambda module, args, out: calls.append((args, out)))
    for shape in ((1, 1), (1, 7), (3, 17)):
        ids = torch.randint(4, 300, shape, generator=torch.Generator().manual_seed(3))
        paired = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
        with torch.no_grad():
            model(input_ids=ids, **paired)
    hook.remove()
    return calls


def from_slots(kind: str, model: Any, layer: int) -> tuple[Any, Shuffled, Heard]:
    """Put a layer's experts into slots that are served in random order, and give what takes the module's place."""
    module = model.get_submodule(find_moe_modules(model)[layer].name)
    arena, layout, slots = in_slots(module, kind, seed=1)
    engine, heard = Shuffled(topology_of(model), layer, slots, seed=2), Heard()
    form = LAYERS[kind]
    stand_in = form.empty(module)
    form.attach(stand_in, Place(layer, engine, arena, layout, heard), form.prepare(stand_in, layout))  # type: ignore[arg-type]
    return stand_in, engine, heard


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", FAMILIES)
def test_the_order_of_arrival_changes_no_bit(kind: str, dtype: torch.dtype) -> None:
    model = tiny_models.build(FAMILIES[kind]).to(dtype)
    calls = calls_of(model, find_moe_modules(model)[1].name)
    stand_in, engine, heard = from_slots(kind, model, layer=1)
    for args, expected in calls:
        for _ in range(4):
            with torch.no_grad():
                found = stand_in(*args)
            pairs = zip(found, expected, strict=True) if isinstance(expected, tuple) else [(found, expected)]
            assert all(torch.equal(left, right) for left, right in pairs)
        needed, one_token = engine.calls[-1]
        chosen = {int(expert) for expert in heard.ids[-1].ravel() if expert >= 0}
        assert one_token == (len(heard.ids[-1]) == 1)
        assert {expert - 8 for expert in needed} == ({0, 1} if kind == "nllb" else chosen)


def test_nllb_loads_what_runs_and_reports_what_was_chosen() -> None:
    """With no first choice kept there is no row for expert 1, and expert 0 takes all of them."""
    model = tiny_models.build("nllb_moe")
    stand_in, engine, heard = from_slots("nllb", model, layer=0)
    resident: Any = tiny_models.build("nllb_moe").get_submodule(find_moe_modules(model)[0].name)
    hidden_TH = torch.randn(3, 32, generator=torch.Generator().manual_seed(0))
    mask_TE, weights_TE = torch.zeros(3, 8, dtype=torch.int64), torch.zeros(3, 8)
    weights_TE[:, 5] = 0.25  # second choices
    with torch.no_grad():
        assert torch.equal(stand_in(hidden_TH, mask_TE, weights_TE), resident(hidden_TH, mask_TE, weights_TE))
    assert engine.calls[-1][0] == [0]
    assert heard.ids[-1].tolist() == [[-1, 5]] * 3


def test_identity_experts_of_longcat_need_nothing() -> None:
    model = tiny_models.build("longcat_flash")
    stand_in, engine, heard = from_slots("longcat", model, layer=0)
    hidden_TH = torch.randn(2, 32, generator=torch.Generator().manual_seed(0))
    ids_TK, weights_TK = torch.tensor([[8, 11, 9], [10, 8, 9]]), torch.tensor([[0.5, 1.0, 2.0], [0.25, 0.25, 0.5]])
    with torch.no_grad():
        out_TH = stand_in(hidden_TH, ids_TK, weights_TK)
    torch.testing.assert_close(out_TH, hidden_TH * torch.tensor([[3.5], [1.0]]))
    assert engine.calls == [], "no event"
    assert heard.ids[-1].tolist() == [[-1] * 3] * 2


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_llama4_s_published_sizes_choose_one_expert(dtype: torch.dtype) -> None:
    model = tiny_models.build("llama4", text_config={**_text("llama4"), "num_experts_per_tok": 1}).to(dtype)
    calls = calls_of(model, find_moe_modules(model)[0].name)
    stand_in, _, heard = from_slots("llama4", model, layer=0)
    for args, expected in calls:
        with torch.no_grad():
            assert torch.equal(stand_in(*args)[0], expected[0])
    assert heard.ids[-1].shape == (51, 1)


def _text(name: str) -> dict[str, Any]:
    config: Any = tiny_models.build(name).config
    return config.get_text_config().to_dict()


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_batched_products_have_the_batch_s_bits_at_any_number_of_threads(threads: int) -> None:
    generator = torch.Generator().manual_seed(0)
    layout = layout_of({"gate_up_proj": torch.empty(256, 416), "down_proj": torch.empty(208, 256)})
    act = torch.nn.functional.silu

    def apply(up_MP: torch.Tensor) -> torch.Tensor:
        gate, up = up_MP.chunk(2, dim=-1)
        return up * act(gate)

    kernel = BatchedKernel(SimpleNamespace(has_gate=True, is_concatenated=True, _apply_gate=apply), layout, 8)
    first, down = torch.randn(8, 256, 416, generator=generator), torch.randn(8, 208, 256, generator=generator)
    torch.set_num_threads(threads)
    for tokens in (1, 5, 7, 100):
        x_ETH = torch.randn(8, tokens, 256, generator=generator)
        expected = torch.bmm(apply(torch.bmm(x_ETH, first)), down)
        for expert in range(8):
            tensors = {"gate_up_proj": first[expert], "down_proj": down[expert]}
            rows = kernel.rows(tensors, x_ETH[expert], expert * tokens, 8 * tokens)
            assert torch.equal(rows, expected[expert]), (tokens, expert)


def test_copies_are_products() -> None:
    x, weight = torch.arange(6.0).view(2, 3), torch.arange(12.0).view(3, 4)
    assert torch.equal(copies_product(3)(x, weight, True), x @ weight)
    assert torch.equal(copies_product(2)(x, weight.t(), False), x @ weight)


def test_where_no_product_agrees_it_is_said(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(BatchedKernel, "_agrees", lambda *args: False)
    layout = layout_of({"gate_up_proj": torch.empty(8, 32), "down_proj": torch.empty(16, 8)})
    gated = SimpleNamespace(has_gate=True, is_concatenated=True, _apply_gate=lambda up: up[:, :16] * up[:, 16:])
    with caplog.at_level(logging.WARNING):
        BatchedKernel(gated, layout, 4)
    assert "no product gave the probes' bits" in caplog.text


def test_stand_ins_keep_what_is_dense_by_its_name() -> None:
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(torch.ones(3))
    module.bias = torch.nn.Parameter(torch.ones(2))
    module.register_buffer("count", torch.ones(1), persistent=False)
    module.register_buffer("scale", torch.ones(1))
    module.router, module.act = torch.nn.Linear(2, 2), torch.nn.SiLU()
    drop_parameters(module, ["weight"])
    stand_in = StandIn("switch", 3, module)
    assert {name for name, _ in stand_in.named_parameters()} == {"bias", "router.weight", "router.bias"}
    assert {name for name, _ in stand_in.named_buffers()} == {"count", "scale"}
    assert set(stand_in.state_dict()) == {"bias", "scale", "router.weight", "router.bias"}
    assert stand_in.num_experts == 3


def test_kinds_without_a_layer_are_refused_and_can_be_given_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "LAYERS", dict(LAYERS))
    with pytest.raises(ModelError, match="kind 'sorted' can be recorded but not offloaded"):
        layer_class("sorted")
    sorted_layer = type("SortedLayer", (SwitchLayer,), {"kind": "sorted"})
    register_layer(sorted_layer)
    register_layer(sorted_layer)
    assert layer_class("sorted") is sorted_layer
    with pytest.raises(SettingError, match="kind must not be one of fused, switch"):
        register_layer(type("Impostor", (SwitchLayer,), {}))


CHANGES: dict[str, Callable[..., Any]] = {  # a family computed otherwise: its module's forward made out of the old one
    "switch": lambda old: lambda self, hidden, mask, weights: old(self, hidden, mask, weights) * 2,
    "nllb": lambda old: lambda self, hidden, mask, weights: _nllb_as_it_should_be(self, hidden, weights),
    "llama4": lambda old: lambda self, hidden: (old(self, hidden)[0] + 1, old(self, hidden)[1]),
    "dbrx": lambda old: lambda self, hidden, ids, weights: old(self, hidden, ids.flip(1), weights),
    "jetmoe": lambda old: lambda self, hidden, mask: old(self, hidden),
    "longcat": lambda old: lambda self, hidden, ids, weights: old(self, hidden, ids, weights.square()),
    "step3p7": lambda old: lambda self, hidden, ids, weights: old(self, hidden, ids, weights).flip(0),
}


def _nllb_as_it_should_be(self: Any, hidden_TH: torch.Tensor, weights_TE: torch.Tensor) -> torch.Tensor:
    """Let every expert with a weight run."""
    parts = [self[f"expert_{e}"](hidden_TH) * weights_TE[:, e, None] for e in range(2)]
    return sum(parts) * (1 - self.moe_token_dropout)  # type: ignore[return-value]


@pytest.mark.parametrize("kind", CHANGES)
def test_a_version_of_transformers_that_computes_a_family_otherwise_is_refused(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_models.build(FAMILIES[kind])
    form = type(model.get_submodule(find_moe_modules(model)[0].name))
    monkeypatch.setattr(form, "forward", CHANGES[kind](form.forward))
    with pytest.raises(ModelError, match=f"{form.__name__} of transformers .* experts; use a version of transformers"):
        from_slots(kind, model, layer=0)


def test_grafts_copy_no_more_than_they_change() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.SiLU()))
    weight = torch.eye(2)
    twin = graft(module, {"1.0.weight": weight})
    assert torch.equal(twin.get_parameter("1.0.weight"), weight)
    assert not torch.equal(module.get_parameter("1.0.weight"), weight)
    assert twin.get_submodule("0") is module.get_submodule("0")
    assert twin.get_submodule("1.1") is module.get_submodule("1.1")
    assert not twin.get_parameter("1.0.weight").requires_grad


def test_a_layer_class_without_a_probe_is_not_compared_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(LAYERS["dbrx"], "probe", classmethod(lambda *args: None))
    with caplog.at_level(logging.WARNING):
        from_slots("dbrx", tiny_models.build("dbrx"), layer=0)
    assert "dbrx experts are not compared with their module" in caplog.text
