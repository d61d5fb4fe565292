"""Kinds of experts modules: each finds its own, cuts them into views, and reads what the router really chose."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from foregate.collect import kinds as registry
from foregate.collect import tiny_models
from foregate.collect.architectures import expert_tensors, find_moe_modules, topology_of
from foregate.collect.errors import ModelError, SettingError
from foregate.collect.kinds import EXCEPTIONS, KINDS, kind_named, kind_of, register_kind
from foregate.collect.kinds.base import ExpertsKind, Widening
from foregate.collect.recorder import RoutingRecorder
from torch import nn
from torch.overrides import TorchFunctionMode

EXAMPLES = {
    "fused": "qwen3_moe",
    "switch": "switch_transformers",
    "nllb": "nllb_moe",
    "llama4": "llama4",
    "dbrx": "dbrx",
    "jetmoe": "jetmoe",
    "longcat": "longcat_flash",
    "step3p7": "step3p7",
    "zaya": "zaya",
}
NAMES = {
    "fused": r"mlp\.experts$",
    "switch": r"mlp\.experts$",
    "nllb": r"ffn\.experts$",
    "llama4": r"feed_forward$",
    "dbrx": r"ffn\.experts$",
    "jetmoe": r"mlp$",
    "longcat": r"mlp\.experts$",
    "step3p7": r"mlp\.experts$",
    "zaya": r"experts$",
}


def batch(num_rows: int = 3, num_tokens: int = 13, seed: int = 0) -> torch.Tensor:
    return torch.randint(4, 300, (num_rows, num_tokens), generator=torch.Generator().manual_seed(seed))


def record(model: Any, **inputs: torch.Tensor) -> list[Any]:
    if model.config.is_encoder_decoder:
        inputs.setdefault("decoder_input_ids", batch(len(inputs["input_ids"]), 7, seed=1))
    with torch.no_grad(), RoutingRecorder(model) as recorder:
        model(**inputs)
        return recorder.take()


def test_every_kind_has_an_example() -> None:
    assert set(EXAMPLES) == set(KINDS)


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_finds_its_own_modules_and_no_others(kind: str) -> None:
    model = tiny_models.build(EXAMPLES[kind])
    found = find_moe_modules(model)
    assert {item.kind for item in found} == {kind}
    for item in found:
        assert re.search(NAMES[kind], item.name), item.name
    for name, module in model.named_modules():
        claims = [form.name for form in KINDS.values() if form.matches(module)]
        if type(module).__name__ in EXCEPTIONS:
            assert kind_of(module) == EXCEPTIONS[type(module).__name__] == kind, name
        else:
            assert claims == ([kind] if name in {item.name for item in found} else []), name


@pytest.mark.parametrize("kind", KINDS)
def test_experts_are_disjoint_views_that_make_up_what_is_stored(kind: str) -> None:
    model = tiny_models.build(EXAMPLES[kind])
    item = find_moe_modules(model)[-1]
    module, form = model.get_submodule(item.name), KINDS[kind]
    stored = form.stored(module)
    assert form.num_experts(module) == item.layer.num_experts == 8
    for parameter in stored.values():
        parameter.data.zero_()
    names = set()
    for expert in range(8):
        tensors = expert_tensors(module, kind, expert)
        names.add(tuple(tensors))
        for tensor in tensors.values():
            assert not tensor.any(), "another expert's"
            assert tensor.numel()
            tensor.data.fill_(expert + 1)
    assert len(names) == 1
    unread = 4 * 32 * 32 if kind == "longcat" else 0  # gate and up of 4 identity experts
    assert sum(int((parameter == 0).sum()) for parameter in stored.values()) == unread
    dense = {name for name, _ in module.named_parameters()} - set(stored)
    assert dense == {
        "llama4": {"router.weight", *(f"shared_expert.{name}_proj.weight" for name in ("gate", "up", "down"))},
        "jetmoe": {"bias", "router.layer.weight"},
    }.get(kind, set())


@pytest.mark.parametrize("kind", KINDS)
def test_tensor_names_differ_between_experts_and_parts(kind: str) -> None:
    names = [KINDS[kind].tensor_name(expert, name) for expert in range(12) for name in ("one", "two")]
    assert len(set(names)) == 24


class TopKs(TorchFunctionMode):
    """Note the indices of every top-k that a model takes."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[torch.Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if getattr(func, "__name__", "") == "topk":
            self.found.append(out[1].clone())
        return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["fused", "llama4", "dbrx", "jetmoe", "longcat", "step3p7"])
def test_recorded_ids_are_those_of_the_model_s_own_top_k(kind: str, dtype: torch.dtype) -> None:
    model = tiny_models.build(EXAMPLES[kind]).to(dtype)
    with TopKs() as seen:
        routing = record(model, input_ids=batch())
    if kind == "jetmoe":
        del seen.found[::2]  # of its attention
    if kind == "llama4":
        del seen.found[1::2]  # the recorder's own
    assert len(seen.found) == len(routing) == 2
    for layer, ids in zip(routing, seen.found, strict=True):
        expected = ids.reshape(-1, 3).numpy()
        identity = expected >= 8  # of LongCat: nothing is loaded for them
        assert identity.any() == (kind == "longcat")
        np.testing.assert_array_equal(layer.experts, np.where(identity, -1, expected))
        assert (layer.weights[identity] == 0).all()
        assert (layer.weights[~identity] > 0).all()


@contextmanager
def watched(model: nn.Module) -> Iterator[list[torch.Tensor]]:
    """Note the logits of every classifier of a router."""
    seen: list[torch.Tensor] = []
    hooks = [
        module.register_forward_hook(lambda module, args, out: seen.append(out.clone()))
        for name, module in model.named_modules()
        if name.endswith("router.classifier")
    ]
    yield seen
    for hook in hooks:
        hook.remove()


def two_choices(logits_NE: np.ndarray, capacity: int) -> np.ndarray:
    """Choose as NLLB's router does, in a slow and obvious way: first choices fill experts before second ones."""
    order = np.argsort(-logits_NE, axis=1, kind="stable")[:, :2]
    chosen, taken = np.full(order.shape, -1), np.zeros(logits_NE.shape[1], int)
    for choice in (0, 1):
        for token, expert in enumerate(order[:, choice]):
            if taken[expert] < capacity:
                chosen[token, choice] = expert
            taken[expert] += 1
    return chosen


@pytest.mark.parametrize("fraction", [-1.0, 0.1])
def test_nllb_records_what_the_router_chose_and_dropped(fraction: float) -> None:
    model = tiny_models.build("nllb_moe", moe_eval_capacity_token_fraction=fraction)
    with watched(model) as seen:
        routing = record(model, input_ids=batch(2, 15))
    assert len(seen) == len(routing) == 4
    dropped = 0
    for layer, logits in zip(routing, seen, strict=True):
        capacity = math.ceil(fraction * len(logits)) if fraction > 0 else 64  # the config's expert_capacity
        expected = two_choices(logits.reshape(-1, 8).double().numpy(), capacity)
        np.testing.assert_array_equal(layer.experts, expected)
        assert (layer.weights[expected < 0] == 0).all()
        assert (layer.weights[expected >= 0] > 0).all()
        dropped += int((expected < 0).sum())
    assert (dropped > 0) == (fraction > 0)


def test_weights_are_what_the_experts_get() -> None:
    """A Llama 4 score is the sigmoid of a chosen logit, JetMoE's weights are a softmax over the chosen ones."""
    model = tiny_models.build("llama4")
    logits: list[torch.Tensor] = []
    block: Any = model.get_submodule(find_moe_modules(model)[0].name)
    block.router.register_forward_hook(lambda module, args, out: logits.append(out[1]))
    layer = record(model, input_ids=batch())[0]
    chosen = logits[0].gather(1, torch.from_numpy(layer.experts.astype(np.int64)))
    np.testing.assert_array_equal(layer.weights, torch.sigmoid(chosen).numpy())

    model = tiny_models.build("jetmoe")
    logits.clear()
    block = model.get_submodule(find_moe_modules(model)[0].name)
    block.router.register_forward_hook(lambda module, args, out: logits.append(out[4]))
    layer = record(model, input_ids=batch())[0]
    chosen = logits[0].gather(1, torch.from_numpy(layer.experts.astype(np.int64)))
    np.testing.assert_array_equal(layer.weights, torch.softmax(chosen, dim=1).numpy())


@pytest.mark.parametrize(
    ("kind", "values", "reason"),
    [
        ("fused", (torch.zeros(2, 4),), "called with 1 arguments"),
        ("dbrx", (torch.zeros(2, 4), torch.zeros(2, 3)), "called with 2 arguments"),
        ("llama4", (torch.zeros(2, 8),), "gave 1 values"),
        ("llama4", (torch.zeros(2, 8), torch.zeros(2, 3)), "expected scores and logits of one shape"),
        ("jetmoe", (torch.zeros(2, 8),) * 3, "gave 3 values"),
    ],
)
def test_a_call_of_another_form_is_refused(kind: str, values: Any, reason: str) -> None:
    model = tiny_models.build(EXAMPLES[kind])
    module = model.get_submodule(find_moe_modules(model)[0].name)
    with pytest.raises(ModelError, match=reason):
        KINDS[kind].routing(module, values)


@pytest.mark.parametrize("kind", ["fused", "llama4", "dbrx", "jetmoe", "step3p7"])
def test_parameters_of_another_number_of_experts_are_refused(kind: str) -> None:
    model = tiny_models.build(EXAMPLES[kind])
    tensors = KINDS[kind].stored(model.get_submodule(find_moe_modules(model)[0].name))
    with pytest.raises(ModelError, match=r"which are not those of 7 experts|holds 8 experts where the layer has 7"):
        KINDS[kind].expert(tensors, 0, 7)


def test_widening_says_what_grows() -> None:
    module = nn.Module()
    assert KINDS["fused"].widening(module, "gate_up_proj") == Widening(parts=2, divide=False)
    assert KINDS["fused"].widening(module, "down_proj") == Widening(parts=1, divide=True)
    assert KINDS["switch"].widening(module, "expert_3.wi.weight") == Widening(parts=1, divide=False)
    assert KINDS["switch"].widening(module, "expert_3.wo.weight") == Widening(parts=1, divide=True)
    assert KINDS["nllb"].widening(module, "expert_3.fc1.weight") is None


class Everything(ExpertsKind):
    """A kind for a module with a mark."""

    name = "everything"

    def matches(self, module: nn.Module) -> bool:
        return hasattr(module, "mark")

    def top_k(self, module: Any) -> int:
        return 1

    def routing(self, module: Any, values: Any) -> Any:
        return values

    def stored(self, module: nn.Module) -> dict[str, nn.Parameter]:
        return dict(module.named_parameters())

    def expert(self, tensors: Any, expert: int, num_experts: int) -> dict[str, torch.Tensor]:
        return {name: tensor[expert] for name, tensor in tensors.items()}


class Marked(nn.Module):
    """A module that only `Everything` knows."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts, self.mark = 3, True
        self.weight = nn.Parameter(torch.ones(3, 2))


def test_a_program_can_add_a_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "KINDS", dict(KINDS))
    assert kind_of(Marked()) is None
    register_kind(Everything())
    register_kind(Everything())
    assert kind_of(Marked()) == "everything"
    assert kind_named("everything").num_experts(Marked()) == 3
    impostor = type("Impostor", (Everything,), {"name": "switch"})
    with pytest.raises(SettingError, match="name must not be one of fused, switch"):
        register_kind(impostor())


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ModelError, match=r"kind must be one of fused, switch, .*, got 'sorted'; register it first"):
        kind_named("sorted")


def test_exceptions_go_before_structure(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_models.build("qwen3_moe")
    experts = model.get_submodule(find_moe_modules(model)[0].name)
    monkeypatch.setitem(EXCEPTIONS, type(experts).__name__, None)
    assert kind_of(experts) is None
    with pytest.raises(ModelError, match="has no MoE layers"):
        find_moe_modules(model)


def test_what_a_store_left_keeps_its_kind() -> None:
    module = nn.Module()
    module.foregate_kind = "dbrx"
    assert kind_of(module) == "dbrx"


@pytest.mark.parametrize("kind", KINDS)
def test_topology_counts_every_byte_once(kind: str) -> None:
    model = tiny_models.build(EXAMPLES[kind])
    topology = topology_of(model)
    blocks = itertools.product(find_moe_modules(model), range(8))
    experts = sum(
        tensor.numel() * tensor.element_size()
        for item, expert in blocks
        for tensor in expert_tensors(model.get_submodule(item.name), kind, expert).values()
    )
    assert experts == topology.num_experts * topology.expert_bytes
    total = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    assert topology.dense_bytes + experts <= total
