"""Finding MoE layers: place, size, top-k, bytes, and fingerprints that see what matters and nothing else."""

from __future__ import annotations

import pytest
import torch
from foregate.collect import tiny_models
from foregate.collect.architectures import INFLATED, expert_tensors, find_moe_modules, model_fingerprint, topology_of
from foregate.collect.errors import ModelError
from torch import nn


def test_blocks_count_dense_ones_and_layers_do_not() -> None:
    modules = find_moe_modules(tiny_models.build("deepseek_v3"))
    assert [(item.name, item.layer.block) for item in modules] == [
        ("model.layers.1.mlp.experts", 1),
        ("model.layers.2.mlp.experts", 2),
    ]


def test_encoder_before_decoder() -> None:
    topology = topology_of(tiny_models.build("switch_transformers"))
    assert [(layer.stack, layer.block) for layer in topology.layers] == [
        ("encoder", 1),
        ("encoder", 3),
        ("decoder", 1),
        ("decoder", 3),
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "switch_transformers"])
def test_bytes_of_an_expert_and_of_the_dense_part(name, dtype) -> None:
    model = tiny_models.build(name).to(dtype)
    topology = topology_of(model)
    experts = 0
    for item in find_moe_modules(model):
        for expert in range(item.layer.num_experts):
            tensors = expert_tensors(model.get_submodule(item.name), item.kind, expert)
            size = sum(value.numel() * value.element_size() for value in tensors.values())
            assert size == topology.expert_bytes
            experts += size
    total = sum(value.numel() * value.element_size() for value in model.parameters())
    embedding = model.get_input_embeddings().weight
    tied = model.get_output_embeddings().weight is embedding  # read in full as the head
    assert topology.dense_bytes == total - experts - (0 if tied else embedding.numel() * embedding.element_size())


def test_what_a_store_left_behind_is_found() -> None:
    model = tiny_models.build("qwen3_moe")
    expected = topology_of(model)
    for item in find_moe_modules(model):
        module = model.get_submodule(item.name)
        module._parameters.clear()
        module.expert_bytes = expected.expert_bytes
    assert topology_of(model) == expected


def test_a_model_without_experts_is_refused_with_what_it_has() -> None:
    class TinyMLP(nn.Module):
        pass

    model = nn.Sequential(TinyMLP(), nn.Linear(2, 2))
    with pytest.raises(ModelError, match=r"Sequential has no MoE layers .*feed-forward modules: TinyMLP"):
        find_moe_modules(model)


def test_fingerprints_ignore_dtype_paths_and_implementations() -> None:
    model = tiny_models.build("qwen3_moe")
    before = model_fingerprint(model.config)
    model.set_experts_implementation("eager")
    model.config._name_or_path = "elsewhere"
    model.config.dtype = torch.bfloat16
    assert model_fingerprint(model.config) == before
    assert model_fingerprint(tiny_models.build("qwen3_moe", num_experts=16).config) != before
    assert model_fingerprint(tiny_models.build("mixtral").config) != before


def test_fingerprints_look_into_parts() -> None:
    class Config:
        def __init__(self, **part: object) -> None:
            self.part = part

        def to_dict(self) -> dict:
            return {"dtype": "float32", "text_config": dict(self.part)}

    assert model_fingerprint(Config(dtype="bfloat16", size=3)) == model_fingerprint(Config(dtype="float32", size=3))
    assert model_fingerprint(Config(size=3)) != model_fingerprint(Config(size=4))


def test_fingerprints_see_through_inflation() -> None:
    class Config:
        def __init__(self, **values: object) -> None:
            self.values = values

        def to_dict(self) -> dict:
            return dict(self.values)

    plain, wide = Config(moe_intermediate_size=16), Config(moe_intermediate_size=64)
    assert model_fingerprint(plain) != model_fingerprint(wide)
    wide.values[INFLATED] = {"moe_intermediate_size": 4}
    assert model_fingerprint(plain) == model_fingerprint(wide)
