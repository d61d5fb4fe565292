"""Experts that several MoE layers share: stored once, computed in turn; and tokens that skip theirs."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from foregate.collect import tiny_models
from foregate.collect.architectures import find_moe_modules, left_as_they_are
from foregate.collect.recorder import RoutingRecorder
from foregate.runtime import load
from foregate.runtime.manifest import MANIFEST
from foregate.runtime.pack import pack
from foregate.runtime.reference import open_reference
from foregate.runtime.store import ExpertStore
from safetensors import safe_open


def packed(name: str, folder, **overrides: object) -> ExpertStore:
    tiny_models.build(name, **overrides).save_pretrained(folder / "model")
    return pack(folder / "model", folder / "store")


def test_tied_experts_are_stored_once(tmp_path) -> None:
    store = packed("diffusion_gemma", tmp_path)
    assert store.topology.num_layers == 4
    assert len(store.files) == 2
    for expert in range(8):
        encoder, decoder = store.topology.flat(0, expert), store.topology.flat(2, expert)
        assert store.segments(encoder) == store.segments(decoder)
        assert store.checksum(encoder) == store.checksum(decoder)
    homes = [layer.get("home", "") for layer in json.loads((store.path / MANIFEST).read_text())["layers"]]
    assert homes == ["", "", store.module_names[0], store.module_names[1]]
    again = ExpertStore.open(store.path)
    assert again.manifest == store.manifest


def test_a_loop_is_stored_once_and_its_passes_are_layers(tmp_path) -> None:
    store = packed("inkling2_loop", tmp_path)
    assert [layer.block for layer in store.topology.layers] == [0, 1, 2, 1, 2, 1, 2, 3]
    assert len(store.files) == 4
    assert [layer.file for layer in store.manifest.layers] == [0, 1, 2, 1, 2, 1, 2, 3]


def test_an_error_inside_of_a_loop_does_not_shift_the_next_forward(tmp_path) -> None:
    store = packed("inkling2_loop", tmp_path)
    ids = torch.arange(4, 14)[None]
    resident = open_reference(store, None, trust_remote_code=False)
    model = load(store.path, slots=6)
    with torch.inference_mode(), model.foregate:
        assert torch.equal(model(input_ids=ids).logits, resident(input_ids=ids).logits)
        block = model.get_submodule("model.language_model.layers.2")
        handle = block.register_forward_pre_hook(lambda module, args: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            model(input_ids=ids)
        handle.remove()
        assert torch.equal(model(input_ids=ids).logits, resident(input_ids=ids).logits)
    assert not model.get_submodule("model.language_model.layers.0.mlp.experts")._forward_pre_hooks


def test_experts_that_text_does_not_pass_stay_in_the_dense_part(tmp_path) -> None:
    model = tiny_models.build("ernie4_5_vl_moe")
    store = packed("ernie4_5_vl_moe", tmp_path)
    assert not [name for name in store.module_names if "vision" in name]
    with safe_open(store.path / "model.safetensors", "pt") as dense:
        names = list(dense.keys())
        vision = [name for name in names if "vision_moe.experts" in name]
        assert len(vision) == 2 * len(left_as_they_are(model))
        assert not [name for name in names if "text_moe.experts" in name]
    offloaded = load(store.path, slots=6)
    with offloaded.foregate:
        hidden, ids, weights = torch.randn(5, 32), torch.randint(0, 8, (5, 3)), torch.rand(5, 3)
        place = left_as_they_are(model)[0]
        left, right = (each.get_submodule(place)(hidden, ids, weights) for each in (model, offloaded))
        torch.testing.assert_close(left, right)


def test_skipped_experts_are_recorded_as_none_and_computed_as_the_resident_does(tmp_path) -> None:
    model = tiny_models.build("zaya")
    ids = torch.arange(4, 64)[None]
    for router in (module for module in model.modules() if type(module).__name__ == "ZayaRouter"):
        seen: list[torch.Tensor] = []
        handle = router.register_forward_hook(lambda module, args, output, seen=seen: seen.append(output[0]))
        with torch.inference_mode():
            model(input_ids=ids)
        handle.remove()
        probabilities = seen[0].softmax(-1)
        lead = probabilities[:, :-1].max(dim=-1).values - probabilities[:, -1]
        router.balancing_biases[-1] = float(lead.median())  # the choice to skip wins for half of the tokens
    model.save_pretrained(tmp_path / "model")
    with torch.inference_mode(), RoutingRecorder(model, scores=True) as recorder:
        model(input_ids=ids)
        routing = recorder.take()
    chosen = np.concatenate([layer.experts for layer in routing])
    assert 0 < (chosen == -1).sum() < len(chosen)
    assert all((layer.weights[layer.experts == -1] == 0).all() for layer in routing)
    pack(tmp_path / "model", tmp_path / "store")
    offloaded = load(tmp_path / "store", slots=2)
    for left, right in zip(model.buffers(), offloaded.buffers(), strict=True):
        right.copy_(left)  # transformers sets the bias of skipping back to -1 whenever it loads such a model
    model.set_experts_implementation("grouped_mm")
    with torch.inference_mode(), offloaded.foregate, RoutingRecorder(offloaded) as recorder:
        assert torch.equal(offloaded(input_ids=ids).logits, model(input_ids=ids).logits)
        for before, after in zip(routing, recorder.take(), strict=True):
            np.testing.assert_array_equal(before.experts, after.experts)
    assert [item.kind for item in find_moe_modules(offloaded)] == ["zaya", "zaya"]
