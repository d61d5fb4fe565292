"""The seam into transformers: what it registers, what it refuses, what it leaves to the model."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from foregate.collect.errors import SettingError, StoreError
from foregate.runtime import load, registration
from foregate.runtime.alignment import align_weights
from foregate.runtime.config import RuntimeConfig
from foregate.runtime.quantizer import METHOD, ForegateConfig, ForegateQuantizer, runtime_settings
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING

Pack = Callable[..., Any]


def our_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("foregate")]


def test_the_method_is_registered_once() -> None:
    assert AUTO_QUANTIZER_MAPPING[METHOD] is ForegateQuantizer
    assert AUTO_QUANTIZATION_CONFIG_MAPPING[METHOD] is ForegateConfig
    registration.register()
    registration.register()
    assert AUTO_QUANTIZER_MAPPING[METHOD] is ForegateQuantizer


def test_saving_is_refused_and_leaves_nothing(packed: Pack, tmp_path: Path) -> None:
    model = load(packed("qwen3_moe").store, slots=0.5)
    with model.foregate:
        with pytest.raises(ValueError, match="foregate and is not serializable"):
            model.save_pretrained(tmp_path / "copy")
        assert not list(tmp_path.rglob("*.safetensors"))
        assert not model.hf_quantizer.is_trainable


def test_another_dtype_is_refused_in_one_sentence(packed: Pack) -> None:
    store = packed("qwen3_moe", torch.bfloat16).store
    with pytest.raises(SettingError) as refusal:
        AutoModelForCausalLM.from_pretrained(store, dtype=torch.float32)
    assert str(refusal.value) == "dtype must be bfloat16, the store's own, got torch.float32; leave dtype out."
    assert not our_threads()


def test_a_store_is_loaded_from_its_folder_only(packed: Pack) -> None:
    pair = packed("qwen3_moe")
    config = AutoConfig.from_pretrained(pair.store)
    with pytest.raises(SettingError, match="loaded from its folder"):
        type(pair.resident).from_pretrained(None, config=config, state_dict=pair.resident.state_dict())


def test_settings_hold_inside_their_block(packed: Pack) -> None:
    store = packed("qwen3_moe").store
    with runtime_settings(RuntimeConfig(slots=4, threads=1)):
        model = AutoModelForCausalLM.from_pretrained(store)
    with model.foregate as handle:
        assert handle.stats().slots == 4
        assert [thread.name for thread in our_threads()] == ["foregate-transfer-0"]
    other = AutoModelForCausalLM.from_pretrained(store)
    with other.foregate as handle:
        assert handle.config == RuntimeConfig()


def test_a_store_without_its_mark_is_not_taken_for_one(packed: Pack, tmp_path: Path) -> None:
    copy = tmp_path / "store"
    shutil.copytree(packed("qwen3_moe").store, copy)
    config = json.loads((copy / "config.json").read_text())
    del config["quantization_config"]
    (copy / "config.json").write_text(json.dumps(config))
    with pytest.raises(StoreError, match="has no quant_method foregate"):
        load(copy, slots=0.5)
    assert not our_threads()


def test_weights_end_up_at_the_start_of_a_cache_line(packed: Pack) -> None:
    model = load(packed("qwen3_moe").store, slots=0.5)
    with model.foregate:
        assert all(tensor.data_ptr() % 64 == 0 for tensor in [*model.parameters(), *model.buffers()])


def test_aligning_keeps_values_and_sharing() -> None:
    memory = torch.arange(64, dtype=torch.float32)
    shared = torch.nn.Parameter(memory[1:17].view(4, 4))
    module = torch.nn.Module()
    module.first, module.second = shared, shared
    module.aligned = torch.nn.Parameter(torch.ones(3))
    module.register_buffer("buffer", memory[3:7])
    untouched = module.aligned.data_ptr()
    align_weights(module)
    assert module.first is module.second
    assert torch.equal(module.first, torch.arange(1.0, 17.0).view(4, 4))
    assert torch.equal(module.buffer, torch.arange(3.0, 7.0))
    assert module.aligned.data_ptr() == untouched
    assert not any(tensor.data_ptr() % 64 for tensor in [*module.parameters(), *module.buffers()])


def test_a_backward_pass_is_refused(packed: Pack) -> None:
    from foregate.collect.errors import ModelError

    pair = packed("qwen3_moe")
    model = load(pair.store, slots=0.5)
    with model.foregate:
        loss = model(**pair.inputs(1, 5)).logits.sum()
        with pytest.raises(ModelError, match="train the resident model"):
            loss.backward()
