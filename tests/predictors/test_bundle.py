"""Bundles: parity, checksums, refusal, and nothing half-written."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from foregate.collect.errors import BundleError, SettingError
from foregate.collect.topology import MoeLayer, MoeTopology
from foregate.predictors import bundle_writer, parity
from foregate.predictors.base import BatchPredictor, PredictorSpec, Step, TokenPredictor
from foregate.predictors.bundle import CARD, GRAPH, WEIGHTS, Bundle, check_target, load_predictor, seal
from foregate.predictors.bundle_writer import write_bundle
from foregate.predictors.network import Network
from foregate.predictors.rows import fingerprint
from foregate.predictors.scoring import scores_of
from foregate.predictors.sru_attention import SruAttentionSettings

CAUSAL = MoeTopology.uniform(2, 6, 2)
SWITCH = MoeTopology(layers=tuple(MoeLayer(stack="encoder", block=i, num_experts=5, top_k=1) for i in (1, 3)))
SMALL = SruAttentionSettings(embedding=4, hidden=8, attention=4, window=5, discount=0.8)


def network_for(topology: MoeTopology, stack: str = "causal") -> Network:
    torch.manual_seed(0)
    spec = PredictorSpec(
        family="sru_attention", horizon=SMALL.horizon(stack), topology=topology, stack=stack, vocab_size=50
    )
    network = SMALL.build(spec, np.arange(40))
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return network


@pytest.fixture(scope="module")
def token_bundle(tmp_path_factory, draw_rows) -> Bundle:
    rows = draw_rows(CAUSAL)
    card = {"model": "m", "model_fingerprint": "abc"}
    return write_bundle(
        tmp_path_factory.mktemp("token") / "b", network_for(CAUSAL), card=card, real=rows, trained_on=rows[:3]
    )


@pytest.fixture(scope="module")
def batch_bundle(tmp_path_factory, draw_rows) -> Bundle:
    return write_bundle(tmp_path_factory.mktemp("batch") / "b", network_for(SWITCH, "encoder"), real=draw_rows(SWITCH))


def copy_of(bundle: Bundle, folder: Path) -> Path:
    out = folder / "copy"
    out.mkdir()
    for name in (CARD, GRAPH, WEIGHTS):
        (out / name).write_bytes((bundle.path / name).read_bytes())
    return out


def test_card_says_what_and_how_well(token_bundle, batch_bundle, draw_rows):
    for bundle in (token_bundle, batch_bundle):
        card = bundle.card
        assert card["parity"]["max_abs_diff"] <= 1e-4
        kinds = {(case["inputs"], case["batch"], case["tokens"]) for case in card["parity"]["cases"]}
        assert {kind[0] for kind in kinds} == {"random", "trace"}
        assert len({kind[1] for kind in kinds}) > 1
        assert len({kind[2] for kind in kinds}) > 2
        assert 0 < card["latency_ms"]["p50"] <= card["latency_ms"]["p99"]
        assert card["versions"]["onnxruntime"]
        assert card["inputs"][0]["name"] == "token_ids"
        assert card["outputs"][0]["name"] == "probabilities"
    assert token_bundle.card["window"] == 5
    assert token_bundle.card["reuse"]["discount"] == 0.8
    assert "reuse" not in batch_bundle.card
    assert token_bundle.training_sequences() == {fingerprint(row) for row in draw_rows(CAUSAL)[:3]}
    assert batch_bundle.training_sequences() == set()


def test_runs_like_the_network(token_bundle, batch_bundle, draw_rows):
    predictor = load_predictor(token_bundle.path)
    assert isinstance(predictor, TokenPredictor)
    network = network_for(CAUSAL).eval()
    for item in scores_of(predictor, draw_rows(CAUSAL), batch=5):
        assert item.by_horizon["token"].shape == item.reuse.shape == (*item.experts.shape[:2], 6)
    state, mine = predictor.start(2), network.start(2)
    with torch.no_grad():
        for t in range(8):
            step = Step(np.array([t, 60]), np.random.default_rng(t).integers(0, 2, (2, 2, 6)).astype(np.float32))
            given, state = predictor.step(step, state)
            logits, mine = network.step(torch.from_numpy(step.token_ids), torch.from_numpy(step.previous), mine)
            np.testing.assert_allclose(given.routing, network.probabilities(logits.routing).numpy(), atol=1e-5)
            np.testing.assert_allclose(given.reuse, network.shares(logits.reuse).numpy(), atol=1e-5)
            np.testing.assert_allclose(given.reuse.sum(-1), 2, atol=1e-4)
    other = load_predictor(batch_bundle)
    assert isinstance(other, BatchPredictor)
    for num_tokens in (1, 2, 90):
        assert other.predict(np.zeros((3, num_tokens), int), np.ones((3, num_tokens), bool)).shape == (
            3,
            num_tokens,
            2,
            5,
        )


def test_wrong_shapes_are_refused(token_bundle, batch_bundle):
    predictor = load_predictor(token_bundle)
    with pytest.raises(SettingError, match="2, 6"):
        predictor.step(Step(np.zeros(2), np.zeros((2, 3, 6))), predictor.start(2))
    with pytest.raises(SettingError, match="one shape"):
        load_predictor(batch_bundle).predict(np.zeros((2, 3)), np.ones((2, 4)))


@pytest.mark.parametrize("name", [GRAPH, WEIGHTS, CARD])
def test_altered_bundles_are_refused(name, token_bundle, tmp_path):
    path = copy_of(token_bundle, tmp_path)
    Bundle.open(path)
    if name == CARD:
        card = json.loads((path / CARD).read_text())
        card["model"] = "another"
        (path / CARD).write_text(json.dumps(card))
    else:
        data = bytearray((path / name).read_bytes())
        data[len(data) // 2] ^= 1
        (path / name).write_bytes(data)
    with pytest.raises(BundleError, match=f"altered: {name}"):
        Bundle.open(path)


@pytest.mark.parametrize("damage", ["no folder", "no graph", "no JSON", "a list", "newer"])
def test_damaged_bundles_are_refused(damage, token_bundle, tmp_path):
    path = copy_of(token_bundle, tmp_path)
    if damage == "no folder":
        path = tmp_path / "nowhere"
    elif damage == "no graph":
        (path / GRAPH).unlink()
    else:
        (path / CARD).write_text({"no JSON": "{", "a list": "[]", "newer": '{"format_version": 99}'}[damage])
    with pytest.raises(BundleError) as caught:
        Bundle.open(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("entries", "reason"),
    [
        ({"rings": None}, "rings must be names"),
        ({"rings": ["no_such_state"]}, "rings must be names"),
        ({"temperature": {"token": "hot"}}, "temperature must give a positive number"),
        ({"temperature": {"token": 0.0}}, "temperature must give a positive number"),
        ({"temperature": 1.5}, "temperature must give a positive number"),
        ({"training": ["t.npz"]}, "training must be an object"),
        ({"vocab_size": "many"}, "vocab_size must be a number"),
        ({"vocab_size": -3}, "vocab_size must be a number"),
    ],
)
def test_cards_without_sense_are_refused_whatever_their_checksums_say(entries, reason, token_bundle, tmp_path):
    copy = copy_of(token_bundle, tmp_path)
    card = json.loads((copy / CARD).read_text())
    seal(copy, {name: value for name, value in card.items() if name != "checksums"} | entries)
    with pytest.raises(BundleError, match=reason):
        Bundle.open(copy)


def test_weights_without_sense_are_refused_when_they_are_read(token_bundle, tmp_path):
    copy = copy_of(token_bundle, tmp_path)
    (copy / WEIGHTS).write_bytes(b"no tensors")
    card = json.loads((copy / CARD).read_text())
    seal(copy, {name: value for name, value in card.items() if name != "checksums"})
    with pytest.raises(BundleError, match="damaged"):
        load_predictor(copy)
    with pytest.raises(BundleError, match="gives no no_such"):
        token_bundle.tensor("no_such")


def test_a_file_in_the_way_is_noticed(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(BundleError, match="is a file"):
        check_target(tmp_path / "file" / "below" / "bundle")


def test_a_bundle_of_another_model_is_refused(token_bundle):
    token_bundle.require(CAUSAL)
    token_bundle.require(MoeTopology.uniform(2, 6, 2, expert_bytes=7), "abc")
    with pytest.raises(BundleError, match=r"2 causal layers x 6 experts, top-2.*3 causal layers x 6 experts, top-2"):
        token_bundle.require(MoeTopology.uniform(3, 6, 2))
    with pytest.raises(BundleError, match=r"abc.*xyz"):
        token_bundle.require(CAUSAL, "xyz")
    shifted = MoeTopology(layers=tuple(MoeLayer(stack="causal", block=i + 1, num_experts=6, top_k=2) for i in range(2)))
    with pytest.raises(BundleError, match="MoE layer 0 is block 0 there and 1 here"):
        token_bundle.require(shifted)


def test_a_graph_that_differs_is_refused_and_nothing_is_left(token_bundle, tmp_path, monkeypatch):
    monkeypatch.setattr(bundle_writer, "export_graph", lambda network: (token_bundle.path / GRAPH).read_bytes())
    other = network_for(CAUSAL)
    with torch.no_grad():
        other.heads.bias.add_(0.01)
    with pytest.raises(BundleError, match="differs from the network by"):
        write_bundle(tmp_path / "b", other)
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(parity, "TOLERANCE", 1.0)
    write_bundle(tmp_path / "b", other)
    before = (tmp_path / "b" / CARD).read_bytes()
    with pytest.raises(BundleError, match="exists already"):
        write_bundle(tmp_path / "b", other, card={"model": "new"})
    assert (tmp_path / "b" / CARD).read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["b"]


@pytest.mark.parametrize(
    "names",
    [["notes"], [CARD, "config.json", "model.safetensors"], [CARD, GRAPH, WEIGHTS], [GRAPH, WEIGHTS]],
    ids=["other", "a model that has a card", "a bundle", "no card"],
)
def test_other_folders_are_not_replaced(names, tmp_path):
    for name in names:
        (tmp_path / name).write_text("mine")
    with pytest.raises(BundleError, match="exists already"):
        write_bundle(tmp_path, network_for(CAUSAL))
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == dict.fromkeys(names, "mine")


def test_running_needs_no_torch(token_bundle):
    code = (
        "import sys; from foregate.predictors.bundle import load_predictor; import numpy as np;"
        "from foregate.predictors.base import Step; p = load_predictor(sys.argv[1]);"
        "p.step(Step(np.zeros(1), np.zeros((1, 2, 6))), p.start(1)); print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(token_bundle.path)], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "False"
