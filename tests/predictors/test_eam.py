"""The matching of requests: parallel equals layer by layer equals NumPy's, what it retrieves, and learning online."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from foregate.collect.errors import BundleError, SettingError
from foregate.collect.topology import MoeLayer, MoeTopology
from foregate.predictors.activation_matrices import activation_matrix, row_shares
from foregate.predictors.base import PredictorSpec, Step
from foregate.predictors.bundle import load_predictor, seal
from foregate.predictors.bundle_writer import write_bundle
from foregate.predictors.eam import EamNetwork, EamSettings
from foregate.predictors.eam_online import OnlineEam
from foregate.predictors.onnx_predictor import OnnxLayerPredictor
from foregate.predictors.rows import dense, ids_of, many_hot, statistics

UNIFORM = MoeTopology.uniform(4, 8, 2)
UNEVEN = MoeTopology(
    layers=tuple(
        MoeLayer(stack="causal", block=i, num_experts=e, top_k=k) for i, (e, k) in enumerate([(4, 1), (8, 3), (6, 2)])
    )
)


def build(topology: MoeTopology, rows, **settings) -> EamNetwork:
    chosen = EamSettings(**({"capacity": 16, "reach": 2} | settings))
    spec = PredictorSpec(family="eam", horizon="layer", topology=topology, stack="causal", vocab_size=50)
    found = statistics(rows, topology, spec.shape[1])
    network = chosen.build(spec, found.token_ids)
    network.learn(rows, found)
    return network.eval()


def inputs(topology: MoeTopology, rows) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Give ids [B, T], previous and used [B, T, L, E]."""
    used = torch.tensor(np.stack([many_hot(dense(row, topology), topology.max_experts) for row in rows]))
    ids = torch.tensor(np.stack([ids_of(row) for row in rows]))
    return ids, torch.cat([torch.zeros_like(used[:, :1]), used[:, :-1]], dim=1), used


def online(network: EamNetwork, **settings) -> OnlineEam:
    sizes = network.sizes
    own = {name: getattr(sizes, name) for name in ("capacity", "temperature", "decay", "reach")}
    matrices = network.collection_CLE[network.present_C].numpy()
    return OnlineEam(network.spec, matrices, network.popularity_LE.numpy(), **(own | settings))


@pytest.mark.parametrize("decay", [1.0, 0.6])
@pytest.mark.parametrize("topology", [UNIFORM, UNEVEN], ids=["uniform", "uneven"])
@torch.no_grad()
def test_layer_by_layer_equals_the_parallel_form_and_numpy(topology, decay, draw_rows):
    network = build(topology, draw_rows(topology, sequences=10), decay=decay)
    ids, previous, used = inputs(topology, draw_rows(topology, sequences=2, tokens=(8, 9), seed=5))
    slow = online(network)
    for stride in (1, 2):
        state, slow_state = network.start(2), slow.start(2)
        whole, wanted, last = network.layers(ids, previous, used, state, stride)
        torch.testing.assert_close(network(ids, previous, state)[0].routing, whole.routing)
        for t in range(ids.shape[1]):
            logits, state = network.step(ids[:, t], previous[:, t], state)
            given, slow_state = slow.step(Step(ids[:, t].numpy(), previous[:, t].numpy()), slow_state)
            torch.testing.assert_close(logits.routing, whole.routing[:, t], atol=1e-4, rtol=1e-4)
            said = network.probabilities(logits.routing).numpy()
            np.testing.assert_allclose(given.routing, said, atol=1e-5)
            for layer in range(-1, topology.num_layers - stride):
                row = layer + stride
                ahead = network.ahead(torch.tensor(layer), used[:, t], state)[:, row]
                torch.testing.assert_close(ahead, wanted[:, t, row], atol=1e-4, rtol=1e-4)
                slowly = slow.ahead(layer, used[:, t].numpy(), slow_state)[:, row]
                np.testing.assert_allclose(slowly, network.probabilities(wanted)[:, t, row].numpy(), atol=1e-5)
        torch.testing.assert_close(state["counts"], last["counts"])


@torch.no_grad()
def test_a_stored_request_retrieves_itself(draw_rows):
    rows = draw_rows(UNIFORM, sequences=10, tokens=(30, 40))
    network = build(UNIFORM, rows, temperature=0.001)
    for row in rows:
        matrix = activation_matrix(row, UNIFORM, 8)
        known = torch.tensor(matrix)[None].clone()
        known[:, 3] = 0  # its first three layers find it, the fourth is foretold
        given = network.probabilities(network.ahead(torch.tensor(2), known, network.start(1)))[0]
        np.testing.assert_allclose(given.numpy(), 2 * row_shares(matrix), atol=1e-3)


@torch.no_grad()
def test_says_popularity_before_anything_was_seen(draw_rows):
    rows = draw_rows(UNEVEN, sequences=10)
    network = build(UNEVEN, rows)
    logits, _ = network.step(torch.tensor([3]), torch.zeros(1, *network.spec.shape), network.start(1))
    wanted = statistics(rows, UNEVEN, 8).popularity_LE
    np.testing.assert_allclose(network.probabilities(logits.routing)[0].numpy(), wanted, atol=1e-5)


def test_has_no_parameters_and_survives_its_state_dict(draw_rows):
    network = build(UNIFORM, draw_rows(UNIFORM, sequences=10))
    assert not list(network.parameters())
    other = network.sizes.build(network.spec, np.arange(0))
    other.load_state_dict(network.state_dict())
    counts = torch.rand(3, *network.spec.shape)
    torch.testing.assert_close(other._logits(counts), network._logits(counts))


def test_a_bundle_goes_on_learning(tmp_path, draw_rows):
    rows = draw_rows(UNIFORM, sequences=8)
    bundle = write_bundle(tmp_path / "eam", build(UNIFORM, rows, capacity=9), real=rows[:1])
    served, learning = load_predictor(bundle), OnlineEam.of_bundle(tmp_path / "eam")
    assert isinstance(served, OnnxLayerPredictor)
    used = inputs(UNIFORM, rows[:1])[2][:, 0].numpy()
    state = served.step(Step(np.array([1]), np.zeros_like(used)), served.start(1))[1]
    np.testing.assert_allclose(learning.ahead(0, used, learning.start(1)), served.ahead(0, used, state), atol=1e-5)
    new = np.zeros(learning.spec.shape, np.float32)
    new[:, :2] = 1
    assert learning.learn(new) is None  # there was room
    assert len(learning.collection) == 9
    assert np.abs(learning.ahead(0, new[None], learning.start(1)) - served.ahead(0, new[None], state)).max() > 0.1
    card = {name: value for name, value in bundle.card.items() if name != "checksums"}
    seal(bundle.path, {**card, "family": "mlp"})
    with pytest.raises(BundleError, match="family 'mlp'; give one of 'eam'"):
        OnlineEam.of_bundle(bundle.path)


def test_a_full_collection_gives_up_what_is_most_similar(draw_rows):
    learning = online(build(UNIFORM, draw_rows(UNIFORM, sequences=6)), capacity=6)
    before = learning.collection
    like_the_third = before[2] * 7
    like_the_third[0, 0] += 0.1
    assert learning.learn(like_the_third) == 2
    assert before is not learning.collection
    np.testing.assert_allclose(learning.collection[2], row_shares(like_the_third), rtol=1e-6)
    np.testing.assert_array_equal(learning.collection[[0, 1, 3, 4, 5]], before[[0, 1, 3, 4, 5]])
    for wrong in (np.ones((2, 2), np.float32), np.zeros(learning.spec.shape, np.float32)):
        with pytest.raises(SettingError, match="at least one use"):
            learning.learn(wrong)
    with pytest.raises(SettingError, match="capacity 5 takes 1 to as many matrices, got 6"):
        online(build(UNIFORM, draw_rows(UNIFORM, sequences=6)), capacity=5)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"capacity": 0}, "capacity must be at least 1, got 0"),
        ({"reach": 0}, "reach must be at least 1, got 0"),
        ({"members": "first"}, "members must be one of nearest, centres, got 'first'"),
        ({"temperature": 0.0}, "temperature must be at least 0.001"),
        ({"decay": 0.0}, r"decay must lie in \(0, 1\], got 0.0"),
    ],
)
def test_refuses_settings_that_mean_nothing(settings, match):
    with pytest.raises(SettingError, match=match):
        EamSettings(**settings)
