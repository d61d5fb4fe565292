"""Loaded stores beside resident models: equal bits for every family, way of generating and number of slots."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import foregate.runtime
import pytest
import torch
from foregate.collect import tiny_models
from foregate.collect.errors import SettingError, StoreError
from foregate.runtime import load

DTYPES = [torch.float32, torch.bfloat16]
NEW = 6

Pack = Callable[..., Any]  # what the fixture `packed` gives


def logits(model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    with torch.no_grad():
        return model(**inputs).logits


def generated(model: Any, inputs: dict[str, torch.Tensor], **settings: Any) -> tuple[torch.Tensor, ...]:
    """Generate and give the tokens and every step's logits."""
    torch.manual_seed(7)
    out = model.generate(
        **inputs,
        max_new_tokens=NEW,
        min_new_tokens=NEW,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
        **settings,
    )
    return out.sequences, *out.logits


def same(left: tuple[torch.Tensor, ...], right: tuple[torch.Tensor, ...]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", sorted(tiny_models.FORMS))
def test_every_family_has_the_resident_bits(packed: Pack, name: str, dtype: torch.dtype) -> None:
    pair = packed(name, dtype)
    model = load(pair.store, slots=pair.least)
    with model.foregate as handle:
        for shape in ((1, 9), (3, 17)):
            inputs = pair.inputs(*shape)
            assert torch.equal(logits(model, inputs), logits(pair.resident, inputs))
        prompts = pair.prompts(1, 5)
        assert same(generated(model, prompts, do_sample=False), generated(pair.resident, prompts, do_sample=False))
        handle.engine.check()
        assert handle.damaged_slots() == []


def test_a_prefill_that_threads_share_has_the_resident_bits(packed: Pack) -> None:
    """1,001 tokens x top-3 rows of 16: the second thread begins in mid-row."""
    pair = packed("qwen3_moe")
    model = load(pair.store, slots=0.5)
    with model.foregate:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            inputs = pair.inputs(1, 1001)
            assert torch.equal(logits(model, inputs), logits(pair.resident, inputs))


WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "temperature": 1.5, "top_k": 40},
    "beams": {"do_sample": False, "num_beams": 3},
}


@pytest.mark.parametrize("slots", [1.0, 0.5, "least"])
@pytest.mark.parametrize(
    ("name", "dtype"),
    [("qwen3_moe", torch.bfloat16), ("gpt_oss", torch.float32), ("switch_transformers", torch.float32)],
)
def test_any_number_of_slots(packed: Pack, name: str, dtype: torch.dtype, slots: float | str) -> None:
    pair = packed(name, dtype)
    model = load(pair.store, slots=pair.least if slots == "least" else slots)
    with model.foregate as handle:
        for way in WAYS.values():
            for shape in ((1, 7), (2, 11)):
                prompts = pair.prompts(*shape, seed=1)
                if shape[0] > 1:  # the first prompt of a batch is shorter: padding on the left
                    prompts["input_ids"][0, :4] = 0
                    prompts["attention_mask"][0, :4] = 0
                assert same(generated(model, prompts, **way), generated(pair.resident, prompts, **way))
                handle.engine.check()
        stats = handle.stats()
        held = handle.engine.cache.capacity
        assert stats.slots == held == {1.0: pair.experts, 0.5: pair.experts // 2, "least": pair.top_k}[slots]
        assert stats.hits + stats.misses == sum(row.hits + row.misses for row in stats.per_layer)
        assert stats.bytes_read == stats.misses * stats.block_bytes
        assert (stats.mode, stats.reason) == ("off", "no predictor")
        if slots == 1.0:
            assert stats.misses <= pair.experts, "each expert is read once"
        assert handle.damaged_slots() == []


def test_a_loaded_model_is_an_ordinary_one_without_experts(packed: Pack) -> None:
    pair = packed("qwen3_moe")
    model = load(pair.store, slots=0.5)
    with model.foregate:
        assert type(model) is type(pair.resident)
        assert not model.training
        own, resident = dict(model.named_parameters()), dict(pair.resident.named_parameters())
        assert {name for name in resident if name not in own} == {name for name in resident if ".experts." in name}
        assert all(parameter.device.type == "cpu" for parameter in own.values())
        assert all(torch.equal(parameter, resident[name]) for name, parameter in own.items())


def test_transformers_own_way_in_takes_a_store(packed: Pack) -> None:
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

    for name, factory in (("qwen3_moe", AutoModelForCausalLM), ("switch_transformers", AutoModelForSeq2SeqLM)):
        pair = packed(name)
        model = factory.from_pretrained(pair.store)
        with model.foregate as handle:
            assert handle.stats().slots == pair.experts  # half of the memory is enough for all of so few
            inputs = pair.inputs(2, 9)
            assert torch.equal(logits(model, inputs), logits(pair.resident, inputs))


REGISTERS = """
import sys
import foregate.runtime
assert not {"torch", "transformers"} & set(sys.modules), "importing the runtime imports neither"
import transformers
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
assert model.foregate.stats().experts == 16
assert not any(type(finder).__module__.startswith("foregate") for finder in sys.meta_path)
foregate.runtime.registration.register()
model.foregate.close()
print("loaded")
"""


def test_importing_the_runtime_is_enough_for_transformers_to_know_stores(packed: Pack) -> None:
    done = subprocess.run(
        [sys.executable, "-c", REGISTERS, str(packed("qwen3_moe").store)], capture_output=True, text=True, check=False
    )
    assert done.stdout.endswith("loaded\n"), done.stderr


def test_load_is_what_the_runtime_offers() -> None:
    assert foregate.runtime.load is load
    assert foregate.runtime.__all__ == ["load"]
    with pytest.raises(AttributeError, match="has no attribute 'lode'"):
        foregate.runtime.lode  # noqa: B018


def test_wrong_calls_are_refused_before_anything_is_loaded(packed: Pack, tmp_path: Any) -> None:
    store = packed("qwen3_moe").store
    with pytest.raises(SettingError, match="slot is no setting of load; legal are slots, budget, predictor"):
        load(store, slot=0.5)
    with pytest.raises(SettingError, match="mode must be one of"):
        load(store, mode="fast")
    with pytest.raises(SettingError, match="one token needs 3"):
        load(store, slots=2)
    with pytest.raises(StoreError, match="is no expert store"):
        load(tmp_path)
    with pytest.raises(StoreError, match="is no expert store"):
        load(store.parent / "model", slots=0.5)


def test_a_budget_covers_all_memory_for_experts(packed: Pack) -> None:
    pair = packed("qwen3_moe")
    model = load(pair.store, budget=6 * 8192)
    with model.foregate as handle:
        assert handle.arena.nbytes == 6 * 8192
        assert handle.stats().slots == 5
        inputs = pair.inputs(2, 9)
        assert torch.equal(logits(model, inputs), logits(pair.resident, inputs))


def test_two_models_in_one_process_do_not_know_each_other(packed: Pack) -> None:
    first_pair, second_pair = packed("qwen3_moe"), packed("switch_transformers")
    first, second = load(first_pair.store, slots=3), load(second_pair.store, slots=0.3)
    third = load(first_pair.store, slots=1.0)
    inputs, others = first_pair.inputs(2, 9), second_pair.inputs(2, 9)
    for _ in range(2):
        assert torch.equal(logits(first, inputs), logits(first_pair.resident, inputs))
        assert torch.equal(logits(second, others), logits(second_pair.resident, others))
        assert torch.equal(logits(third, inputs), logits(first_pair.resident, inputs))
    assert third.foregate.stats().misses < first.foregate.stats().misses
    first.foregate.close()
    assert torch.equal(logits(second, others), logits(second_pair.resident, others))
    assert torch.equal(logits(third, inputs), logits(first_pair.resident, inputs))
    second.foregate.close()
    third.foregate.close()


def test_threads_may_run_one_model_at_the_same_time(packed: Pack) -> None:
    pair = packed("qwen3_moe")
    model = load(pair.store, slots=4)
    inputs = [pair.inputs(1, 6 + i, seed=i) for i in range(4)]
    expected = [logits(pair.resident, item) for item in inputs]
    wrong: list[int] = []

    def run(index: int) -> None:
        for _ in range(5):
            if not torch.equal(logits(model, inputs[index]), expected[index]):
                wrong.append(index)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    with model.foregate as handle:
        handle.engine.check()
        assert handle.stats().steps == 20
        assert handle.stats().tokens == 5 * sum(6 + i for i in range(4))
