"""The shadow of an encoder: the model's own gates where no experts stand before them, and what it refuses."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from foregate.collect import tiny_models
from foregate.collect.architectures import topology_of
from foregate.collect.errors import ModelError, SettingError
from foregate.collect.topology import MoeLayer, MoeTopology
from foregate.predictors.base import PredictorSpec
from foregate.predictors.rows import statistics
from foregate.predictors.shadow import Shadow, ShadowSettings

SIZES = ShadowSettings(hidden=32, heads=4, head_width=8, feed_forward=6, model="tiny", link="softmax")


@pytest.fixture(scope="module")
def model():
    return tiny_models.build("switch_transformers")


def shadow_of(model, settings: ShadowSettings = SIZES, topology: MoeTopology | None = None) -> Shadow:
    topology, vocab_size = topology or topology_of(model), model.config.vocab_size
    spec = PredictorSpec(family="shadow", horizon="batch", topology=topology, stack="encoder", vocab_size=vocab_size)
    made = settings.build(spec, np.arange(3))
    made.start_from_model(model)
    return made.eval()


def router_logits(model, ids_BT: torch.Tensor, mask_BT: torch.Tensor) -> list[torch.Tensor]:
    """Give what the encoder's routers computed, [B, T, E] each."""
    seen: list[torch.Tensor] = []
    gates = [block.layer[-1].mlp.router.classifier for block in model.encoder.block if block.layer[-1].is_sparse]
    hooks = [gate.register_forward_hook(lambda _m, _i, out: seen.append(out)) for gate in gates]
    model.encoder(ids_BT, attention_mask=mask_BT.long())
    for hook in hooks:
        hook.remove()
    return [logits.reshape(*ids_BT.shape, -1) for logits in seen]


@torch.no_grad()
def test_gates_are_the_models_own_where_nothing_is_left_out(model):
    """Feed-forward parts of the model are silenced, as the stand-ins are before training, so both must say the same."""
    own, ids = shadow_of(model), torch.randint(0, 300, (2, 40))
    mask = torch.arange(40) < torch.tensor([[40], [29]])
    kept = [block.layer[-1].forward for block in model.encoder.block]
    for block in model.encoder.block:
        part, real = block.layer[-1], block.layer[-1].forward
        part.forward = lambda hidden, *args, real=real, **kwargs: (real(hidden, *args, **kwargs), hidden)[1]
    try:
        wanted = router_logits(model, ids, mask)
    finally:
        for block, forward in zip(model.encoder.block, kept, strict=True):
            block.layer[-1].forward = forward
    said = own(ids, mask)
    raised = [float(torch.exp(block.sharpness)) for block in own.blocks if block.gate is not None]
    assert len(wanted) == len(raised) == 2
    for layer, (logits, factor) in enumerate(zip(wanted, raised, strict=True)):
        torch.testing.assert_close((said[:, :, layer] / factor)[mask], logits[mask], atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_stand_ins_change_what_comes_after_them_alone(model):
    own, ids, mask = shadow_of(model), torch.randint(0, 300, (1, 9)), torch.ones(1, 9, dtype=torch.bool)
    before = own(ids, mask)
    torch.nn.init.normal_(own.blocks[1].stand_in.experts.weight)
    after = own(ids, mask)
    torch.testing.assert_close(before[:, :, 0], after[:, :, 0], atol=0, rtol=0)
    assert (before[:, :, 1] - after[:, :, 1]).abs().max() > 0.01
    assert own.blocks[-1].stand_in is None
    assert own.blocks[0].stand_in.experts is None, "its block is dense"


def test_what_the_model_gave_stays(model):
    names = {name for name, parameter in shadow_of(model).named_parameters() if parameter.requires_grad}
    assert names == {
        f"blocks.{block}.{part}"
        for block, parts in {
            0: ("stand_in.wide.weight", "stand_in.wide.bias", "stand_in.narrow.weight"),
            1: ("stand_in.wide.weight", "stand_in.wide.bias", "stand_in.narrow.weight", "stand_in.experts.weight"),
            2: ("stand_in.wide.weight", "stand_in.wide.bias", "stand_in.narrow.weight"),
            3: (),
        }.items()
        for part in parts
    } | {"blocks.1.sharpness", "blocks.3.sharpness"}
    alone = replace(SIZES, model=None).build(shadow_of(model).spec, np.arange(3))
    assert all(parameter.requires_grad for parameter in alone.parameters())


def test_without_a_model_it_starts_at_the_token_table(draw_rows):
    topology = MoeTopology(layers=tuple(MoeLayer(stack="encoder", block=i, num_experts=6, top_k=1) for i in (0, 2)))
    rows = draw_rows(topology, sequences=40)
    found = statistics(rows, topology, 6)
    spec = PredictorSpec(family="shadow", horizon="batch", topology=topology, stack="encoder", vocab_size=50)
    made = replace(SIZES, model=None).build(spec, found.token_ids)
    made.learn(rows, found)
    common = torch.as_tensor(found.token_ids[:4])[None]
    said = made.eval()(common, torch.ones_like(common, dtype=torch.bool))
    table = found.uses_SLE[:4].argmax(-1)
    assert (said[0].argmax(-1).numpy() == table).mean() > 0.8


def test_other_sizes_are_refused(model):
    for name, wrong in (("hidden", 16), ("heads", 2), ("head_width", 4), ("buckets", 8), ("furthest", 64)):
        with pytest.raises(SettingError, match=f"{name} must be {getattr(SIZES, name)}, as in the model, got {wrong}"):
            shadow_of(model, replace(SIZES, **{name: wrong}))


def test_other_models_are_refused(model):
    with pytest.raises(ModelError, match="no encoder of T5's kind"):
        shadow_of(tiny_models.build("qwen3_moe"), topology=topology_of(model))
    elsewhere = MoeTopology(layers=(MoeLayer(stack="encoder", block=0, num_experts=8, top_k=1),))
    larger = MoeTopology(layers=(MoeLayer(stack="encoder", block=1, num_experts=9, top_k=1),))
    deeper = MoeTopology(layers=(MoeLayer(stack="encoder", block=5, num_experts=8, top_k=1),))
    for topology in (elsewhere, larger, deeper):
        with pytest.raises(ModelError, match="recorded from"):
            shadow_of(model, topology=topology)


def test_a_model_of_fewer_token_ids_is_refused(model):
    spec = replace(shadow_of(model).spec, vocab_size=model.config.vocab_size + 1)
    with pytest.raises(ModelError, match="token ids and the trace"):
        SIZES.build(spec, np.arange(3)).start_from_model(model)


def test_bad_settings_are_refused():
    for stack in ("causal", "decoder"):
        with pytest.raises(SettingError, match=f"got the {stack} stack"):
            SIZES.horizon(stack)
    for wrong in ({"buckets": 7}, {"buckets": 2}, {"buckets": 16, "furthest": 8}, {"hidden": 0}):
        with pytest.raises(SettingError, match=next(iter(wrong))):
            replace(SIZES, **wrong)
