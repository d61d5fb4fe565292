"""The tiny models that every other test stands on."""

import pytest
import torch
from foregate.collect import tiny_models
from foregate.collect.architectures import topology_of
from foregate.collect.errors import SettingError

FEWER = {"llama4": 3, "nllb_moe": 2, "phimoe": 2, "switch_transformers": 1, "zaya": 1}  # what their routers take


@pytest.mark.parametrize("name", sorted(tiny_models.FAMILIES))
def test_is_tiny_and_has_several_layers_and_top_3_where_it_may(name: str) -> None:
    model = tiny_models.build(name)
    topology = topology_of(model)
    assert topology.num_layers >= 2
    assert all(layer.num_experts == 8 for layer in topology.layers)
    assert {layer.top_k for layer in topology.layers} == {FEWER.get(name, 3)}
    assert sum(parameter.numel() for parameter in model.parameters()) < 1_200_000


@pytest.mark.parametrize("name", ["qwen3_moe", "gemma4", "inkling2_loop", "jamba", "switch_transformers"])
def test_generates(name: str) -> None:
    ids = torch.arange(4, 13)[None]
    with torch.no_grad():
        out = tiny_models.build(name).generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=2, do_sample=False
        )
    assert out.shape[0] == 1


def test_is_deterministic_and_leaves_the_random_state() -> None:
    torch.manual_seed(3)
    before = torch.random.get_rng_state()
    first, second = tiny_models.build("qwen3_moe"), tiny_models.build("qwen3_moe")
    assert torch.equal(before, torch.random.get_rng_state())
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)
    other = tiny_models.build("qwen3_moe", seed=1)
    assert not torch.equal(first.get_input_embeddings().weight, other.get_input_embeddings().weight)


def test_overrides_reach_the_config() -> None:
    model = tiny_models.build("qwen3_moe", num_experts=16, num_experts_per_tok=4)
    assert topology_of(model).layers[0].num_experts == 16
    assert topology_of(model).layers[0].top_k == 4


def test_unknown_name_is_refused() -> None:
    with pytest.raises(SettingError, match="got 'gpt-7'"):
        tiny_models.build("gpt-7")


def test_tokenizer_round_trips_any_text() -> None:
    tokenizer = tiny_models.tokenizer()
    assert len(tokenizer) <= tiny_models.VOCAB_SIZE
    text = "A price of 3 \u20ac, tab\tand\nnewline."
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert tiny_models.tokenizer(add_eos=True)(text)["input_ids"] == [*ids, tokenizer.eos_token_id]
    assert tokenizer.pad_token_id == 0
