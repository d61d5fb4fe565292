"""Gates ahead of their layers: each family's chooses as its model does, from recorded hidden states."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from foregate.collect import tiny_models
from foregate.collect.architectures import find_moe_modules
from foregate.collect.errors import DataError, ModelError, SettingError
from foregate.collect.gates import find_gates
from foregate.collect.recorder import RoutingRecorder
from foregate.collect.topology import MoeTopology
from foregate.collect.trace import SequenceRouting
from foregate.predictors.base import LayerPredictor, PredictorSpec, Step
from foregate.predictors.next_gate import GateWeights, NextGate
from foregate.predictors.rows import hidden_of
from foregate.predictors.scoring import measure, own_k, scores_of

# one for each way from a hidden state to a choice
WAYS = {
    "qwen3_moe": {},
    "gpt_oss": {},  # a bias
    "gemma4": {},  # a norm and a scale before the matrix
    "switch_transformers": {},
    "jetmoe": {},
    "deepseek_v3": {"n_group": 4, "topk_group": 2, "num_experts_per_tok": 3},
    "deepseek_v2": {"n_group": 4, "topk_group": 2, "topk_method": "group_limited_greedy"},
    "ernie4_5_moe": {},  # softmax and a correction
    "kolibri1": {},  # logits and a correction
    "muse_spark": {},  # a factor
    "lfm2_moe": {},  # a correction beside the router
    "inkling2_loop": {},  # several layers, one gate
}
NONE = {"zaya": "no gate", "longcat_flash": "no gate", "inkling": "no gate", "deepseek_v4": "no gate"}


def recorded(model: torch.nn.Module, seed: int = 0) -> list:
    """Give each layer's routing of two texts, with hidden states."""
    torch.manual_seed(seed)
    ids = torch.randint(3, 200, (2, 9))
    with RoutingRecorder(model, hidden=True) as recorder, torch.no_grad():
        paired = {"decoder_input_ids": ids} if "encoder" in recorder.topology.stacks else {}
        model(input_ids=ids, **paired)
        return recorder.take()


def build(family: str) -> torch.nn.Module:
    torch.manual_seed(0)
    model = tiny_models.build(family, **WAYS.get(family, {}))
    for gate in find_gates(model, find_moe_modules(model)):
        if gate.correction is not None:
            gate.correction.data.copy_(0.3 * torch.randn(gate.correction.shape))
    return model


@pytest.mark.parametrize("family", WAYS)
def test_a_gate_on_its_own_hidden_state_chooses_as_its_model(family):
    model = build(family)
    routing = recorded(model)
    stack = "causal" if family != "switch_transformers" else "decoder"
    predictor = NextGate.of_model(model, stack=stack)
    own = [routing[index] for index in predictor.spec.layers]
    hidden = np.stack([layer.hidden for layer in own], axis=1)
    assert hidden.dtype == np.float16
    shares = predictor.agreement(hidden, np.stack([layer.experts for layer in own], axis=1))
    assert (shares > 0.98).all(), shares  # float16 may turn a near tie


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_ahead_is_the_real_gate_on_this_layers_hidden_state(family):
    model = build(family)
    routing = recorded(model)
    predictor = NextGate.of_model(model, reach=1)
    assert isinstance(predictor, LayerPredictor)
    modules = dict(model.named_modules())
    names = [name for name in modules if name.endswith(("mlp.gate", "mlp.router"))]
    assert len(names) == len(routing) >= 2
    for layer in range(len(routing) - 1):
        hidden = torch.tensor(routing[layer].hidden).float()
        with torch.no_grad():
            ids = modules[names[layer + 1]](hidden)[-1]  # the model's own router says which experts
        blank = np.zeros((len(hidden), *predictor.spec.shape), np.float32)
        given = predictor.ahead(layer, blank, None, hidden.numpy())
        top_k = predictor.spec.topology.layers[layer + 1].top_k
        chosen = np.argsort(-given[:, layer + 1], axis=1)[:, :top_k]
        np.testing.assert_array_equal(np.sort(chosen, 1), np.sort(ids.numpy(), 1))
        np.testing.assert_array_equal((given[:, layer + 1] > 0.5).sum(1), top_k)
        assert not np.delete(given, layer + 1, axis=1).any()


@pytest.mark.parametrize("family", NONE)
def test_refuses_routers_that_are_more_than_a_matrix(family):
    with pytest.raises(ModelError, match=NONE[family]):
        NextGate.of_model(tiny_models.build(family))


def predictor_of(num_layers: int = 4, num_experts: int = 6, hidden: int = 5, reach: int = 2) -> NextGate:
    rng = np.random.default_rng(0)
    topology = MoeTopology.uniform(num_layers, num_experts, 2)
    spec = PredictorSpec(family="next_gate", horizon="layer", topology=topology, stack="causal", vocab_size=9)
    weights = rng.normal(size=(num_layers, num_experts, hidden)).astype(np.float32)
    return NextGate(spec, [GateWeights(weight=weight) for weight in weights], reach=reach)


def test_says_what_lies_within_reach_and_nothing_else():
    predictor = predictor_of()
    used, hidden = np.zeros((3, 4, 6), np.float32), np.random.default_rng(1).normal(size=(3, 5)).astype(np.float32)
    given, state = predictor.step(Step(np.zeros(3, np.int64), used), predictor.start(3))
    np.testing.assert_allclose(given.routing, 2 / 6)
    for layer in range(-1, 4):
        ahead = predictor.ahead(layer, used, state, hidden)
        assert ahead.dtype == np.float32
        assert ((ahead >= 0) & (ahead <= 1)).all()
        for row in range(4):
            assert ahead[:, row].any() == (layer < row <= layer + 2)
            if layer >= 0 and layer < row <= layer + 2:
                order = np.argsort(-(hidden @ predictor.gates[row].weight.T), axis=1)
                np.testing.assert_array_equal(np.argsort(-ahead[:, row], axis=1), order)


def test_closed_groups_are_out():
    weight = np.diag([9.0, 1, 5, 5]).astype(np.float32)  # groups {0, 1} and {2, 3}
    best = GateWeights(weight=weight, num_groups=2, open_groups=1)
    ones = np.ones((1, 4), np.float32)
    np.testing.assert_array_equal(np.isfinite(best.scores(ones)), [[True, True, False, False]])
    two = GateWeights(weight=weight, correction=np.ones(4, np.float32), scoring="none", num_groups=2, open_groups=1)
    less = np.array([[1, 0.5, 1, 1]], np.float32)  # 9 and 0.5 against 5 and 5
    np.testing.assert_array_equal(np.isfinite(two.scores(less)), [[False, False, True, True]])
    np.testing.assert_array_equal(np.isfinite(best.scores(less)), [[True, True, False, False]])


def test_refuses_a_missing_hidden_state_and_wrong_gates():
    predictor = predictor_of()
    used = np.zeros((3, 4, 6), np.float32)
    with pytest.raises(SettingError, match=r"hidden state \[3, 5\].*MoE layer 1 saw, got none.*--hidden"):
        predictor.ahead(1, used, None)
    with pytest.raises(SettingError, match=r"got \[3, 4\]"):
        predictor.ahead(1, used, None, np.zeros((3, 4), np.float32))
    with pytest.raises(SettingError, match="one gate for each of 4 layers, got 3"):
        NextGate(predictor.spec, predictor.gates[:3])
    with pytest.raises(SettingError, match="reach must be at least 1, got 0"):
        NextGate(predictor.spec, predictor.gates, reach=0)


def test_is_scored_on_rows_that_were_recorded_with_hidden_states():
    predictor = predictor_of()
    rng = np.random.default_rng(3)
    hidden = rng.normal(size=(7, 4, 5)).astype(np.float16)
    seen = np.concatenate([hidden[:, :1], hidden[:, :3]], axis=1).astype(np.float32)  # of the layer before
    scores = np.stack([seen[:, row] @ predictor.gates[row].weight.T for row in range(4)], axis=1)
    experts = np.argsort(-scores, axis=-1)[..., :2].astype(np.int16)
    row = SequenceRouting(sequence="s", experts=experts.reshape(7, 8), hidden=hidden.reshape(7, 20))
    assert measure(predictor, [row]).recall(own_k(predictor)) == 1
    (item,) = scores_of(predictor, [row])
    used = np.zeros((7, 4, 6), np.float32)
    for layer in range(3):
        wanted = predictor.ahead(layer, used, None, hidden_of(row, predictor.spec.topology)[:, layer])
        np.testing.assert_array_equal(item.by_horizon["layer"][:, layer + 1], wanted[:, layer + 1])
    with pytest.raises(DataError, match=r"Sequence 's' has no hidden states.*--hidden"):
        measure(predictor, [SequenceRouting(sequence="s", experts=experts.reshape(7, 8))])
