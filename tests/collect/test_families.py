"""Every MoE family of the installed transformers: found, told apart, and recorded as its routers decided.

The oracle is independent of the recorder: the logits that the family's own routers return, by transformers' own table
of what a model can record, and a plain arg-sort over them.
"""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from foregate.collect import tiny_models
from foregate.collect.anatomy import reads_text, text_model
from foregate.collect.architectures import find_moe_modules, left_as_they_are
from foregate.collect.errors import ModelError
from foregate.collect.families import NO_EXPERTS, family_of, moe_families
from foregate.collect.recorder import RoutingRecorder
from foregate.collect.topology import MoeTopology
from torch import nn

NO_TOPK = {  # ids that come from no top-k and no single argmax
    "deepseek_v4": "layers.0.mlp",  # its first layer asks a table of token ids
    "nllb_moe": "encoder",
    "phimoe": "layers.0.mlp",
}
ROWS, TOKENS = 2, 11


def inputs_of(model: nn.Module, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(4, 300, (ROWS, TOKENS), generator=generator)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = torch.randint(4, 300, (ROWS, TOKENS - 3), generator=generator)
    if hasattr(model.config, "canvas_length"):
        inputs["decoder_input_ids"] = torch.randint(4, 300, (ROWS, model.config.canvas_length), generator=generator)
    return inputs


def watch_routers(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Keep what the routers of the text part return as logits, in the order of their calls."""
    seen: list[tuple[str, torch.Tensor]] = []
    places: dict[type, int] = {}
    for part in model.modules():
        known = getattr(part, "_can_record_outputs", None) or {}
        entries = known.get("router_logits", [])
        for entry in entries if isinstance(entries, list) else [entries]:
            places[getattr(entry, "target_class", entry)] = getattr(entry, "index", 0)
    for name, module in model.named_modules():
        if type(module) in places and reads_text(name):
            place = places[type(module)]
            module.register_forward_hook(
                lambda module, args, output, name=name, place=place: seen.append(
                    (name, output[place] if isinstance(output, tuple) else output)
                )
            )
    assert seen == []
    assert places
    return seen


def test_the_families_found_in_transformers_are_the_ones_that_were_tried() -> None:
    """A new version's new family fails here: give it tiny sizes, and `foregate families --check` a row."""
    assert set(moe_families()) == set(tiny_models.FAMILIES)
    assert len(moe_families()) >= 74
    assert not set(NO_EXPERTS) & set(moe_families())


def test_model_types_lead_to_their_families() -> None:
    for name in tiny_models.FAMILIES:
        assert family_of(tiny_models.config_type(name)) == name
    assert family_of("qwen3_moe") == "qwen3_moe"


@pytest.mark.parametrize("name", sorted(tiny_models.FAMILIES))
def test_recorded_ids_are_those_of_the_routers_logits(name: str) -> None:
    whole = tiny_models.build(name)
    model = text_model(whole)
    seen = watch_routers(whole)
    with torch.no_grad(), RoutingRecorder(whole) as recorder:
        model(**inputs_of(model))
        routing = recorder.take()
    if name == "jetmoe":  # its attention has experts and a router of its own
        seen = [(where, logits) for where, logits in seen if ".mlp." in where]
    if name == "deepseek_v4":  # its first layer has a table of token ids: the test below
        seen = [("", torch.zeros(ROWS * TOKENS, 8)), *seen]
    topology = recorder.topology
    assert len(seen) == topology.num_layers == len(routing)
    for index, ((where, logits), taken) in enumerate(zip(seen, routing, strict=True)):
        layer = topology.layers[index]
        logits_NE = logits.float().reshape(len(taken.experts), -1).numpy()
        if name.startswith("ernie"):  # probabilities, with a bias that balances the experts
            names = [key for key, _ in whole.named_parameters() if key.startswith(where) and "statics" in key]
            (bias,) = (whole.get_parameter(key) for key in names if reads_text(key))
            logits_NE = (torch.from_numpy(logits_NE).softmax(-1) + bias.reshape(-1)).detach().numpy()
        assert taken.calls == (len(taken.experts),)
        assert taken.weights[taken.experts == -1].sum() == 0
        for row, scores in zip(taken.experts.tolist(), logits_NE, strict=True):
            best = np.argsort(-scores, kind="stable")[: layer.top_k].tolist()
            if name == "deepseek_v4" and layer.block == 0:
                assert len(set(row)) == layer.top_k
            elif name == "zaya":  # a ninth choice, biased by -1, skips the experts
                scores = np.exp(scores - scores.max()) / np.exp(scores - scores.max()).sum()
                scores[-1] -= 1
                best = int(np.argmax(scores))
                assert row == [best if best < layer.num_experts else -1]
            elif name == "longcat_flash":  # choices above its experts hand the hidden state on
                assert sorted(row) == sorted(expert if expert < layer.num_experts else -1 for expert in best)
            elif name in ("nllb_moe", "switch_transformers"):
                assert set(row) <= {*best, -1}
            else:
                assert sorted(row) == sorted(best)
    used = np.concatenate([taken.experts.ravel() for taken in routing])
    assert len(set(used.tolist()) - {-1}) >= 2


def test_a_table_of_token_ids_is_recorded() -> None:
    model = tiny_models.build("deepseek_v4")
    inputs = inputs_of(model)
    with torch.no_grad(), RoutingRecorder(model) as recorder:
        model(**inputs)
        first = recorder.take()[0]
    table = model.get_buffer("model.layers.0.mlp.gate.tid2eid")
    np.testing.assert_array_equal(first.experts, table[inputs["input_ids"].reshape(-1)].numpy())


@pytest.mark.parametrize("name", sorted(set(tiny_models.FAMILIES) - set(NO_TOPK)))
def test_scores_are_what_the_top_k_saw(name: str) -> None:
    whole = tiny_models.build(name)
    model = text_model(whole)
    with torch.no_grad(), RoutingRecorder(whole) as recorder:
        model(**inputs_of(model))
        plain = recorder.take()
    with torch.no_grad(), RoutingRecorder(whole, scores=True) as recorder:
        model(**inputs_of(model))
        routing = recorder.take()
    for layer, before, taken in zip(recorder.topology.layers, plain, routing, strict=True):
        np.testing.assert_array_equal(before.experts, taken.experts)
        assert before.scores is None
        assert taken.scores is not None
        assert taken.scores.dtype == np.float32
        assert taken.scores.shape == (len(taken.experts), layer.num_experts)
        for ids, scores in zip(taken.experts.tolist(), taken.scores, strict=True):
            chosen = [expert for expert in ids if expert >= 0]
            assert set(chosen) <= set(np.argsort(-scores, kind="stable")[: layer.top_k].tolist())


@pytest.mark.parametrize("name", sorted(NO_TOPK))
def test_ids_that_no_top_k_gave_have_no_scores(name: str) -> None:
    model = tiny_models.build(name)
    message = rf"MoE layer 0 \(.*{NO_TOPK[name]}.*\) has no scores: its ids do not come"
    with torch.no_grad(), RoutingRecorder(model, scores=True) as recorder:
        model(**inputs_of(model))
        with pytest.raises(ModelError, match=message):
            recorder.take()


def test_scores_of_closed_groups_and_biases_are_those_behind_them() -> None:
    model = tiny_models.build("deepseek_v3", n_group=4, topk_group=2)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(torch.linspace(-0.3, 0.3, len(buffer)))
    with torch.no_grad(), RoutingRecorder(model, scores=True) as recorder:
        model(**inputs_of(model))
        for taken in recorder.take():
            assert taken.scores is not None
            closed = (taken.scores == 0) | np.isneginf(taken.scores)
            assert (closed.sum(axis=1) == 4).all()  # two of four groups of two experts
            best = np.argsort(-taken.scores, axis=1, kind="stable")[:, :3]
            np.testing.assert_array_equal(np.sort(best, axis=1), np.sort(taken.experts, axis=1))


def test_scores_that_do_not_give_the_ids_are_an_error(monkeypatch) -> None:
    model = tiny_models.build("qwen3_moe")
    with torch.no_grad(), RoutingRecorder(model, scores=True) as recorder:
        watch = recorder._watch
        assert watch is not None
        genuine = watch.scores_of
        monkeypatch.setattr(watch, "scores_of", lambda *args: -genuine(*args))
        model(**inputs_of(model))
        with pytest.raises(ModelError, match=r"MoE layer 0 .* not those with the largest scores in \d+ of 22 rows"):
            recorder.take()


def test_a_loop_has_a_layer_for_each_pass_in_the_order_of_the_passes() -> None:
    model = tiny_models.build("inkling2_loop")
    modules = find_moe_modules(model)
    assert [(item.layer.block, item.call) for item in modules] == [
        (0, 0), (1, 0), (2, 0), (1, 1), (2, 1), (1, 2), (2, 2), (3, 0)
    ]  # fmt: skip
    assert [item.home for item in modules] == [0, 1, 2, 1, 2, 1, 2, 7]
    order: list[str] = []
    for name in {item.name for item in modules}:
        model.get_submodule(name).register_forward_pre_hook(lambda module, args, name=name: order.append(name))
    with torch.no_grad():
        model(**inputs_of(model))
    assert order == [item.name for item in modules]


def test_an_error_inside_of_a_loop_does_not_shift_the_next_forward() -> None:
    model = tiny_models.build("inkling2_loop")
    with torch.no_grad(), RoutingRecorder(model) as recorder:
        model(**inputs_of(model))
        expected = recorder.take()
        handle = model.get_submodule("model.language_model.layers.2").register_forward_pre_hook(_fail)
        with pytest.raises(ZeroDivisionError):
            model(**inputs_of(model))
        handle.remove()
        recorder.clear()
        model(**inputs_of(model))
        for before, after in zip(expected, recorder.take(), strict=True):
            np.testing.assert_array_equal(before.experts, after.experts)


def _fail(module: nn.Module, args: tuple) -> None:
    raise ZeroDivisionError


def test_tied_experts_have_one_home_and_two_stacks() -> None:
    modules = find_moe_modules(tiny_models.build("diffusion_gemma"))
    assert [(item.layer.stack, item.layer.block, item.home) for item in modules] == [
        ("encoder", 0, 0),
        ("encoder", 1, 1),
        ("decoder", 0, 0),
        ("decoder", 1, 1),
    ]


def test_experts_that_text_does_not_pass_are_left_and_named(caplog) -> None:
    for name, part in {
        "ernie4_5_vl_moe": "vision_moe",
        "dots3_note": "vision_tower",
        "qwen3_omni_moe": "talker",
    }.items():
        model = tiny_models.build(name)
        left = left_as_they_are(model)
        assert left
        assert all(part in place for place in left)
        assert not set(left) & {item.name for item in find_moe_modules(model)}
        with caplog.at_level("INFO", logger="foregate.collect.recorder"):
            RoutingRecorder(model)
        assert f"{left[0]} is not recorded: text does not pass it" in caplog.text


def test_layers_differ_in_size() -> None:
    model = tiny_models.build("ernie4_5_vl_moe")
    text = find_moe_modules(model)[0]
    assert model.get_submodule(text.name).down_proj.shape[-1] == 16
    assert model.get_submodule(left_as_they_are(model)[0]).down_proj.shape[-1] == 24


def test_a_router_that_takes_another_k_than_it_says() -> None:
    model = tiny_models.build("phimoe", num_experts_per_tok=4)
    with torch.no_grad(), RoutingRecorder(model) as recorder:
        model(**inputs_of(model))
        assert recorder.take()[0].experts.shape == (ROWS * TOKENS, 2)
    assert isinstance(recorder.topology, MoeTopology)
    assert recorder.topology.layers[0].top_k == 2


def test_an_unknown_family_is_told_what_was_found() -> None:
    class LeaderRouter(nn.Module):
        pass

    class TeamMLP(nn.Module):
        pass

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router = LeaderRouter()
            self.experts = nn.ModuleList(TeamMLP() for _ in range(4))

    model = nn.Sequential(Block(), Block())
    found = r"feed-forward modules: TeamMLP; lists of experts: 4 TeamMLP in \*\.experts; routers: LeaderRouter"
    with pytest.raises(ModelError, match=found) as caught:
        find_moe_modules(model)
    assert re.search(r"register its kind of experts", str(caught.value))
