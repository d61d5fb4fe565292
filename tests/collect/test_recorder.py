"""The recorder: what it takes is what the routers decided, and the model is left as it was."""

from __future__ import annotations

import inspect
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from foregate.collect import tiny_models
from foregate.collect.architectures import find_moe_modules, topology_of
from foregate.collect.assembly import record_forward, record_generation
from foregate.collect.errors import ModelError
from foregate.collect.recorder import LayerRouting, RoutingRecorder
from torch import nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

CAUSAL = ("deepseek_v3", "gpt_oss", "jamba", "mixtral", "phimoe", "qwen3_moe")  # all of them: test_families.py


def batch(num_rows: int = 3, num_tokens: int = 9, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(4, 300, (num_rows, num_tokens)))


@contextmanager
def watched_routers(model: nn.Module):
    """Keep what each router returns, by hooks of the test's own."""
    seen: list[tuple] = []
    handles = []
    for item in find_moe_modules(model):
        parent = model.get_submodule(item.name.rpartition(".")[0])
        router = getattr(parent, "gate", None) or getattr(parent, "router", None)
        assert router is not None
        handles.append(router.register_forward_hook(lambda module, args, output: seen.append(output)))
    yield seen
    for handle in handles:
        handle.remove()


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "olmoe", "qwen2_moe"])
def test_recorded_ids_are_the_top_k_of_the_router_logits(name) -> None:
    model = tiny_models.build(name)
    with torch.no_grad(), watched_routers(model) as seen, RoutingRecorder(model) as recorder:
        model(input_ids=batch())
        routing = recorder.take()
    assert len(routing) == len(seen) == 2
    for layer, (logits, _, _) in zip(routing, seen, strict=True):
        scores = logits.float().softmax(-1)
        values, ids = scores.topk(3, dim=-1)
        np.testing.assert_array_equal(layer.experts, ids.numpy())
        if name in ("qwen3_moe", "mixtral"):
            values = values / values.sum(-1, keepdim=True)
        np.testing.assert_allclose(layer.weights, values.numpy(), rtol=1e-6)
        assert layer.experts.dtype == np.int16
        assert layer.weights.dtype == np.float32
        assert layer.calls == (27,)


@pytest.mark.parametrize("name", CAUSAL)
def test_every_family_records_distinct_ids_in_range(name) -> None:
    model = tiny_models.build(name)
    with torch.no_grad(), RoutingRecorder(model) as recorder:
        model(input_ids=batch())
        routing = recorder.take()
    topology = topology_of(model)
    assert recorder.topology.same_routing(topology)
    for layer, known in zip(routing, topology.layers, strict=True):
        assert layer.experts.shape == layer.weights.shape == (27, known.top_k)
        assert 0 <= layer.experts.min() <= layer.experts.max() < known.num_experts
        ids = np.sort(layer.experts, axis=1)
        assert (ids[:, 1:] != ids[:, :-1]).all()


def test_the_model_is_left_as_it_was() -> None:
    model = tiny_models.build("qwen3_moe")
    ids = batch()
    with torch.no_grad():
        before = model(input_ids=ids).logits
    signature = inspect.signature(model.forward)
    forwards = {name: module.forward for name, module in model.named_modules()}

    def hooks() -> int:
        return sum(
            len(module._forward_pre_hooks) + len(module._forward_hooks) + len(module._forward_pre_hooks_with_kwargs)
            for module in model.modules()
        )

    with torch.no_grad(), RoutingRecorder(model):
        assert hooks() > 0
        assert torch.equal(model(input_ids=ids).logits, before)
        assert inspect.signature(model.forward) == signature
        assert {name: module.forward for name, module in model.named_modules()} == forwards
    assert hooks() == 0

    def fail() -> None:
        with RoutingRecorder(model) as recorder:
            model(input_ids=ids[:, :1])
            model(input_ids="words")
            recorder.take()

    with pytest.raises(Exception):  # noqa: B017, PT011  whatever the model raises
        fail()
    assert hooks() == 0


def test_a_layer_that_was_not_called_is_named() -> None:
    model = tiny_models.build("qwen3_moe")
    with RoutingRecorder(model) as recorder:
        with pytest.raises(ModelError, match=r"MoE layer 0 \(model\.layers\.0\.mlp\.experts\) recorded nothing"):
            recorder.take()
        model.model.layers[0].mlp(torch.zeros(1, 2, 32))
        with pytest.raises(
            ModelError, match=r"MoE layer 1 \(model\.layers\.1\.mlp\.experts\) recorded nothing, like 1"
        ):
            recorder.take()
        model(input_ids=batch())  # what was left over from before is not mixed in
        assert recorder.take()[0].calls == (27,)
        with pytest.raises(ModelError, match="recorded nothing"):
            recorder.take()


def test_a_call_of_another_shape_is_refused() -> None:
    model = tiny_models.build("qwen3_moe")
    experts = model.model.layers[0].mlp.experts
    hidden, ids, weights = torch.zeros(2, 32), torch.zeros(2, 2, dtype=torch.long), torch.zeros(2, 2)
    with RoutingRecorder(model):
        with pytest.raises(ModelError, match=r"was called with 2 arguments, expected hidden states, expert ids"):
            experts(hidden, ids)
        with pytest.raises(ModelError, match=r"was called with ids \(2, 2\) .*expected top-3"):
            experts(hidden, ids, weights)


def test_arguments_are_matched_by_position_whatever_their_names() -> None:
    model = tiny_models.build("qwen3_moe", num_hidden_layers=1)
    ids = torch.tensor([[3, 1, 2]])
    with torch.no_grad(), RoutingRecorder(model) as recorder:
        model.model.layers[0].mlp.experts(torch.zeros(1, 32), top_k_index=ids, top_k_weights=torch.ones(1, 3))
        assert recorder.take()[0].experts.tolist() == [[3, 1, 2]]


def test_a_dense_model_is_refused() -> None:
    with pytest.raises(ModelError, match="has no MoE layers that foregate knows"):
        RoutingRecorder(nn.Linear(2, 2))


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "switch_transformers"])
def test_an_offloaded_model_records_alike(name) -> None:
    """Without the experts' weights, and zeros in place of their output, the first MoE layer still routes the same."""
    model = tiny_models.build(name)
    inputs = {"input_ids": batch()} | ({"decoder_input_ids": batch(3, 2)} if name == "switch_transformers" else {})
    with torch.no_grad(), RoutingRecorder(model) as recorder:
        model(**inputs)
        resident = recorder.take()
    for item in find_moe_modules(model):
        module = model.get_submodule(item.name)
        if item.kind == "switch":
            for child in [*module.keys()]:
                del module[child]
            module.forward = lambda hidden, mask, weights: torch.zeros_like(hidden)
        else:
            for parameter in [name for name, _ in module.named_parameters(recurse=False)]:
                delattr(module, parameter)
    if name != "switch_transformers":
        ALL_EXPERTS_FUNCTIONS.register("test_nothing", lambda module, hidden, ids, weights: torch.zeros_like(hidden))
        model.set_experts_implementation("test_nothing")
    with torch.no_grad(), RoutingRecorder(model) as recorder:
        model(**inputs)
        offloaded = recorder.take()
    np.testing.assert_array_equal(offloaded[0].experts, resident[0].experts)
    assert [layer.experts.shape for layer in offloaded] == [layer.experts.shape for layer in resident]


def test_switch_drops_are_visible_in_both_stacks() -> None:
    model = tiny_models.build("switch_transformers", expert_capacity=2)
    inputs = {"input_ids": batch(2, 40), "decoder_input_ids": batch(2, 30, seed=1)}
    with torch.no_grad(), watched_routers(model) as seen, RoutingRecorder(model, scores=True) as recorder:
        model(**inputs)
        routing = recorder.take()
    assert [layer.stack for layer in recorder.topology.layers] == ["encoder", "encoder", "decoder", "decoder"]
    assert [layer.calls for layer in routing] == [(80,), (80,), (60,), (60,)]
    for layer, (_, scores, logits) in zip(routing, seen, strict=True):
        wanted = logits.argmax(-1).numpy()
        taken = layer.experts.reshape(wanted.shape)
        for row_wanted, row_taken in zip(wanted, taken, strict=True):  # capacity counts within a sequence, in order
            counts: dict[int, int] = {}
            for expert, got in zip(row_wanted.tolist(), row_taken.tolist(), strict=True):
                counts[expert] = counts.get(expert, 0) + 1
                assert got == (expert if counts[expert] <= 2 else -1)
        assert (taken == -1).any()
        assert layer.scores is not None  # of dropped tokens too
        np.testing.assert_allclose(layer.scores.reshape(logits.shape), logits.softmax(-1).numpy(), rtol=1e-5, atol=1e-7)
        assert (layer.weights[layer.experts == -1] == 0).all()
        kept = layer.experts.ravel() >= 0
        np.testing.assert_allclose(layer.weights.ravel()[kept], scores.numpy().ravel()[kept], rtol=1e-6)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "deepseek_v3"])
def test_a_padded_batch_equals_unpadded_recording(name, side) -> None:
    model = tiny_models.build(name)
    lengths = [3, 9, 6]
    texts = [batch(1, length, seed=length)[0] for length in lengths]
    ids, mask = torch.zeros(3, 9, dtype=torch.long), torch.zeros(3, 9, dtype=torch.long)
    for row, text in enumerate(texts):
        place = slice(0, len(text)) if side == "right" else slice(9 - len(text), 9)
        ids[row, place], mask[row, place] = text, 1
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad(), RoutingRecorder(model) as recorder:
        model(input_ids=ids, attention_mask=mask, position_ids=positions)
        routing = recorder.take()
        rows = record_forward(recorder.topology, routing, "causal", ids.numpy(), mask.bool().numpy())
        for text, row in zip(texts, rows, strict=True):
            model(input_ids=text[None])
            (alone,) = record_forward(
                recorder.topology, recorder.take(), "causal", text[None].numpy(), np.ones((1, len(text)), bool)
            )
            np.testing.assert_array_equal(row.token_ids, text.numpy())
            np.testing.assert_array_equal(row.experts, alone.experts)
            np.testing.assert_allclose(row.weights, alone.weights, atol=1e-5)


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral"])
def test_a_generation_equals_a_forward_over_its_text(name) -> None:
    model = tiny_models.build(name)
    ids, mask = batch(2, 7), torch.ones(2, 7, dtype=torch.long)
    ids[0, :3], mask[0, :3] = 0, 0
    end = 1
    with torch.no_grad(), RoutingRecorder(model) as recorder:
        new = model.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False, eos_token_id=end)[:, 7:]
        rows = record_generation(
            recorder.topology, recorder.take(), "causal", ids.numpy(), mask.bool().numpy(), new.numpy(), [end]
        )
        for row, prompt_length, generated in zip(rows, (4, 7), new, strict=True):
            assert len(row.token_ids) == prompt_length + len(generated) - 1
            text = torch.from_numpy(row.token_ids.astype(np.int64))[None]
            model(input_ids=text)
            (alone,) = record_forward(
                recorder.topology, recorder.take(), "causal", text.numpy(), np.ones(text.shape, bool)
            )
            np.testing.assert_array_equal(row.experts, alone.experts)


def test_a_sequence_ends_before_its_end_token() -> None:
    topology = RoutingRecorder(tiny_models.build("qwen3_moe", num_hidden_layers=1)).topology
    calls = (2 * 3, 2, 2, 2)
    experts = np.arange(sum(calls) * 3, dtype=np.int16).reshape(-1, 3)
    routing = [LayerRouting(experts, experts.astype(np.float32), calls)]
    ids, mask = np.array([[0, 5, 6], [7, 8, 9]]), np.array([[False, True, True], [True, True, True]])
    generated = np.array([[20, 1, 0, 0], [30, 31, 32, 33]])
    first, second = record_generation(topology, routing, "causal", ids, mask, generated, [1])
    assert first.token_ids.tolist() == [5, 6, 20]  # neither the end token nor the padding behind it
    assert first.experts[:, 0].tolist() == [3, 6, 18]
    assert second.token_ids.tolist() == [7, 8, 9, 30, 31, 32]
    assert second.experts[:, 0].tolist() == [9, 12, 15, 21, 27, 33]
    with pytest.raises(ModelError, match=r"was called 4 times with 6, 2, 2, \.\.\. rows, expected 3 times"):
        record_generation(topology, routing, "causal", ids, mask, generated[:, :3], [1])
    with pytest.raises(ModelError, match="expected 1 times with 6"):
        record_forward(topology, routing, "causal", ids, mask)
