"""One contract, run over every predictor: the free ones, and each trained family out of a bundle."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from foregate.collect.errors import DataError, NotFittedError
from foregate.collect.topology import MoeLayer, MoeTopology
from foregate.predictors.base import (
    BatchPredictor,
    Horizon,
    LayerPredictor,
    Predictor,
    PredictorSpec,
    Step,
    TokenPredictor,
)
from foregate.predictors.baselines import BASELINES, LayerPair, Oracle
from foregate.predictors.bundle import Bundle, load_predictor
from foregate.predictors.bundle_writer import write_bundle
from foregate.predictors.registry import FAMILIES
from foregate.predictors.rows import dense, many_hot, statistics
from foregate.predictors.scoring import measure, own_k

# The second layer is smaller, so that absent experts are checked everywhere.
CAUSAL = MoeTopology(
    layers=tuple(MoeLayer(stack="causal", block=i, num_experts=e, top_k=2) for i, e in enumerate([8, 5, 8]))
)
SWITCH = MoeTopology(layers=tuple(MoeLayer(stack="encoder", block=i, num_experts=6, top_k=1) for i in (1, 3)))
SMALL = {
    "copy_attention": {"embedding": 8, "hidden": 12, "heads": 2, "attention": 4, "window": 4},
    "copy_layers": {"embedding": 8, "hidden": 12, "heads": 2, "attention": 4, "window": 4, "layer_width": 6},
    "eam": {"capacity": 20, "reach": 2},
    "lstm_sparsemax": {"embedding": 8, "hidden": 12, "attention": 4, "window": 4},
    "mlp": {"embedding": 8, "hidden": 12, "window": 3},
    "routing_path": {"hidden": 8, "feed_forward": 12, "encoder_layers": 2, "heads": 2, "window": 4},
    "shadow": {"hidden": 8, "heads": 2, "head_width": 4, "feed_forward": 6},
    "sru_attention": {
        "embedding": 8,
        "hidden": 16,
        "attention": 4,
        "window": 4,
        "discount": 0.8,
        "attention_weights": "entmax15",
    },
}
STACKS = ("causal", "encoder")
ENCODERS_ONLY = ("shadow",)


def horizons_of(name: str) -> list[Horizon]:
    """Give the horizons that a family has, by the stack it serves; free predictors have all that they can do."""
    if name in FAMILIES:
        stacks = STACKS[1:] if name in ENCODERS_ONLY else STACKS
        return list(dict.fromkeys(FAMILIES[name](**SMALL[name]).horizon(stack) for stack in stacks))
    kind = BASELINES[name]
    if hasattr(kind, "ahead"):
        return ["layer"]
    return [horizon for horizon, verb in (("token", "step"), ("batch", "predict")) if hasattr(kind, verb)]


KINDS = [(name, horizon) for name in sorted([*BASELINES, *FAMILIES]) for horizon in horizons_of(name)]


def topology_of(horizon: str) -> MoeTopology:
    return SWITCH if horizon == "batch" else CAUSAL


def spec_of(name: str, horizon: str, vocab_size: int = 50) -> PredictorSpec:
    topology = topology_of(horizon)
    return PredictorSpec(
        family=name, horizon=horizon, topology=topology, stack=topology.stacks[0], vocab_size=vocab_size
    )


@pytest.fixture(scope="module")
def make(tmp_path_factory, draw_rows) -> Callable[[str, str], Predictor]:
    bundles: dict[tuple[str, str], Bundle] = {}

    def bundle_for(name: str, horizon: str) -> Bundle:
        spec, rows = spec_of(name, horizon), draw_rows(topology_of(horizon), sequences=20)
        torch.manual_seed(0)
        found = statistics(rows, spec.topology, spec.shape[1])
        network = FAMILIES[name](**SMALL[name]).build(spec, found.token_ids)
        network.learn(rows, found)
        with torch.no_grad():
            for parameter in network.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
        return write_bundle(tmp_path_factory.mktemp(name) / "bundle", network)

    def build(name: str, horizon: str) -> Predictor:
        if name in BASELINES:
            return BASELINES[name](spec_of(name, horizon)).fit(draw_rows(topology_of(horizon), sequences=20))
        if (name, horizon) not in bundles:
            bundles[name, horizon] = bundle_for(name, horizon)
        return load_predictor(bundles[name, horizon])

    return build


def inputs(horizon: str, *, batch: int = 3, tokens: int = 9, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Draw ids [B, T], some unknown, and the routing used [B, T, L, E]."""
    rng = np.random.default_rng(seed)
    topology = topology_of(horizon)
    ids = rng.integers(-1, 55, (batch, tokens))
    used = np.zeros((batch, tokens, topology.num_layers, topology.max_experts), dtype=np.float32)
    for index, layer in enumerate(topology.layers):
        chosen = np.argsort(rng.random((batch, tokens, layer.num_experts)), axis=-1)[..., : layer.top_k]
        np.put_along_axis(used[:, :, index], chosen, 1, axis=-1)
    return ids, used


def run(predictor: Predictor, ids: np.ndarray, used: np.ndarray) -> np.ndarray:
    """Give the probabilities [B, T, L, E] of a step or a batch."""
    if predictor.spec.horizon == "batch":
        assert isinstance(predictor, BatchPredictor)
        return predictor.predict(ids, np.ones(ids.shape, dtype=bool))
    assert isinstance(predictor, TokenPredictor)
    state, out, previous = predictor.start(len(ids)), [], np.zeros_like(used[:, 0])
    for t in range(ids.shape[1]):
        given, state = predictor.step(Step(ids[:, t], previous), state)
        out.append(given.routing)
        previous = used[:, t]
    return np.stack(out, axis=1)


@pytest.mark.parametrize(("name", "horizon"), KINDS)
class TestPredictor:
    def test_shape_and_range(self, name, horizon, make):
        predictor = make(name, horizon)
        ids, used = inputs(horizon)
        given = run(predictor, ids, used)
        assert given.dtype == np.float32
        assert given.shape == used.shape == (*ids.shape, *predictor.spec.shape)
        assert np.isfinite(given).all()
        assert ((given >= 0) & (given <= 1)).all()
        for index, layer in enumerate(predictor.spec.topology.layers):
            assert (given[:, :, index, layer.num_experts :] == 0).all()

    def test_is_deterministic_and_leaves_its_inputs_alone(self, name, horizon, make):
        predictor = make(name, horizon)
        ids, used = inputs(horizon)
        before = ids.copy(), used.copy()
        np.testing.assert_array_equal(run(predictor, ids, used), run(predictor, ids, used))
        np.testing.assert_array_equal(run(make(name, horizon), ids, used), run(predictor, ids, used))
        np.testing.assert_array_equal(ids, before[0])
        np.testing.assert_array_equal(used, before[1])

    def test_unknown_ids_are_all_alike(self, name, horizon, make):
        predictor = make(name, horizon)
        ids, used = inputs(horizon, batch=1)
        runs = [run(predictor, np.full_like(ids, other), used) for other in (-1, -7, 50, 10**12)]
        for given in runs[1:]:
            np.testing.assert_array_equal(given, runs[0])
        assert np.isfinite(runs[0]).all()

    def test_sequences_of_a_batch_do_not_meet(self, name, horizon, make):
        predictor = make(name, horizon)
        ids, used = inputs(horizon)
        if isinstance(predictor, Oracle):
            pytest.skip("sequence b of the oracle is row b by definition")
        together = run(predictor, ids, used)
        for index in range(len(ids)):
            alone = run(predictor, ids[index : index + 1], used[index : index + 1])
            np.testing.assert_allclose(together[index], alone[0], atol=1e-5)

    def test_empty_routing_and_one_token(self, name, horizon, make):
        ids, used = inputs(horizon, tokens=1)
        assert np.isfinite(run(make(name, horizon), ids, np.zeros_like(used))).all()


@pytest.mark.parametrize(("name", "horizon"), [kind for kind in KINDS if kind[1] != "batch"])
def test_state_is_explicit(name, horizon, make):
    predictor = make(name, horizon)
    assert isinstance(predictor, TokenPredictor)
    streams = [inputs("token", batch=2, seed=seed) for seed in (1, 2)]
    wanted = [run(predictor, *stream) for stream in streams]
    states = [predictor.start(2) for _ in streams]
    for t in range(9):
        for index, (ids, used) in enumerate(streams):  # interleaved
            previous = used[:, t - 1] if t else np.zeros_like(used[:, 0])
            kept = states[index]
            given, states[index] = predictor.step(Step(ids[:, t], previous), kept)
            again, _ = predictor.step(Step(ids[:, t], previous), kept)  # the old state is still good
            np.testing.assert_array_equal(given.routing, again.routing)
            np.testing.assert_array_equal(given.routing, wanted[index][:, t])


@pytest.mark.parametrize(("name", "horizon"), [kind for kind in KINDS if kind[1] == "layer"])
class TestLayers:
    def test_says_what_lies_within_reach_and_nothing_else(self, name, horizon, make):
        predictor = make(name, horizon)
        assert isinstance(predictor, LayerPredictor)
        assert predictor.reach >= 1
        ids, used = inputs(horizon)
        _, state = predictor.step(Step(ids[:, 0], np.zeros_like(used[:, 0])), predictor.start(len(ids)))
        for layer in range(-1, used.shape[2]):
            given = predictor.ahead(layer, used[:, 0], state)
            assert given.dtype == np.float32
            assert given.shape == used[:, 0].shape
            assert ((given >= 0) & (given <= 1)).all()
            inside = range(layer + 1, min(layer + 1 + predictor.reach, used.shape[2]))
            for row, size in enumerate(entry.num_experts for entry in predictor.spec.topology.layers):
                assert (given[:, row].sum() > 0) == (row in inside)
                assert (given[:, row, size:] == 0).all()

    def test_does_not_look_at_later_layers(self, name, horizon, make):
        predictor = make(name, horizon)
        assert isinstance(predictor, LayerPredictor)
        ids, used = inputs(horizon)
        _, state = predictor.step(Step(ids[:, 0], np.zeros_like(used[:, 0])), predictor.start(len(ids)))
        for layer in range(-1, used.shape[2]):
            known = used[:, 0].copy()
            known[:, layer + 1 :] = 0
            np.testing.assert_array_equal(
                predictor.ahead(layer, used[:, 0], state), predictor.ahead(layer, known, state)
            )
            np.testing.assert_array_equal(used, inputs(horizon)[1])


@pytest.mark.parametrize("name", [name for name, horizon in KINDS if horizon == "batch"])
def test_padding_changes_nothing(name, make):
    predictor = make(name, "batch")
    ids, _ = inputs("batch")
    mask = np.arange(9) < np.array([[9], [4], [1]])
    given = predictor.predict(ids, mask)
    assert np.isfinite(given).all()
    if not isinstance(predictor, Oracle):  # sequence b of the oracle is row b by definition
        np.testing.assert_allclose(given[1, :4], predictor.predict(ids[1:2, :4], mask[1:2, :4])[0], atol=1e-5)


@pytest.mark.parametrize("name", sorted(BASELINES))
class TestEstimator:
    def test_refuses_before_fit_and_forgets_at_refit(self, name, draw_rows):
        kind = BASELINES[name]
        fresh = kind(spec_of(name, "token"))
        with pytest.raises(NotFittedError, match=name):
            fresh.start(1)
        first, second = draw_rows(CAUSAL, seed=1), draw_rows(CAUSAL, seed=2)
        refitted = kind(spec_of(name, "token")).fit(first).fit(second)
        other = kind(spec_of(name, "token")).fit(second)
        assert isinstance(refitted, kind)
        ids, used = inputs("token")
        if isinstance(refitted, LayerPair):
            np.testing.assert_array_equal(refitted.ahead(0, used[:, 0], None), other.ahead(0, used[:, 0], None))
        np.testing.assert_array_equal(run(refitted, ids, used), run(other, ids, used))

    def test_needs_rows(self, name):
        with pytest.raises(DataError, match=name):
            BASELINES[name](spec_of(name, "token")).fit([])


def test_order_of_quality(draw_rows):
    """Random is at chance, the oracle is perfect, and what knows more does better."""
    train, test = draw_rows(CAUSAL, sequences=60), draw_rows(CAUSAL, sequences=20, seed=9)
    recall = {}
    for name, kind in BASELINES.items():
        predictor = kind(spec_of(name, horizons_of(name)[0]))
        ordered = sorted(test, key=lambda row: -row.num_tokens)  # as they will be replayed
        predictor.fit(ordered if name == "oracle" else train)
        recall[name] = measure(predictor, ordered, batch=len(test)).recall(own_k(predictor))
    assert recall["oracle"] == 1
    assert recall["random"] == pytest.approx(np.mean([2 / 8, 2 / 5, 2 / 8]), abs=0.04)
    assert recall["random"] < recall["popularity"] < recall["token_table"] < 1
    assert recall["layer_pair"] > recall["random"]


def test_layer_pair_by_hand():
    """Two layers, two experts, top-1: expert 0 is followed by 1 in two tokens of three."""
    from foregate.collect.trace import SequenceRouting

    spec = PredictorSpec(
        family="layer_pair", horizon="layer", topology=MoeTopology.uniform(2, 2, 1), stack="causal", vocab_size=4
    )
    experts = np.array([[0, 1], [0, 1], [0, 0], [1, 0]], dtype=np.int16)
    fitted = LayerPair(spec).fit([SequenceRouting(sequence="s", experts=experts)])
    used = np.zeros((3, 2, 2), np.float32)
    used[[0, 1], 0, [0, 1]] = 1
    given = fitted.ahead(0, used, None)
    np.testing.assert_allclose(given[:, 1], [[1 / 3, 2 / 3], [1, 0], [0.5, 0.5]], atol=1e-6)
    np.testing.assert_allclose(fitted.ahead(-1, used, None)[:, 0], 3 * [[0.75, 0.25]], atol=1e-6)


def test_dense_and_many_hot_keep_what_the_row_says(draw_rows):
    row = draw_rows(CAUSAL, sequences=1)[0]
    hot = many_hot(dense(row, CAUSAL), 8)
    for index, layer in enumerate(row.layer_experts(CAUSAL)):
        for t in range(row.num_tokens):
            assert set(np.flatnonzero(hot[t, index])) == set(layer[t].tolist())
