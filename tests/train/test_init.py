"""Going on from a bundle: same predictions at first, room for new tokens, and nothing forgotten of what it saw."""

from __future__ import annotations

import json

import numpy as np
import pytest
from foregate.cli.main import main
from foregate.collect.errors import BundleError, DataError
from foregate.predictors.bundle import Bundle, load_predictor
from foregate.predictors.bundle_writer import write_bundle
from foregate.predictors.copy_attention import CopyAttentionSettings
from foregate.predictors.copy_layers import CopyLayersSettings
from foregate.predictors.rows import fingerprint
from foregate.predictors.scoring import measure, own_k
from foregate.predictors.sru_attention import SruAttentionSettings
from foregate.train.data import TraceData
from foregate.train.fit import FitSettings, fit
from foregate.train.module import PredictorModule
from foregate.train.split import SplitSettings
from foregate.train.starting_point import bundle_weights, known_ids, network_of, start_from_bundle

NETWORKS = {
    "sru_attention": SruAttentionSettings(embedding=8, hidden=16, attention=8, window=8, dropout=0.1, discount=0.5),
    "copy_attention": CopyAttentionSettings(embedding=8, hidden=16, heads=2, attention=8, window=8),
    "copy_layers": CopyLayersSettings(embedding=8, hidden=16, heads=2, attention=8, window=8, layer_width=6),
}
STEPS = FitSettings(max_steps=25, validate_steps=25, max_epochs=1000)


@pytest.fixture(scope="module", params=sorted(NETWORKS))
def bundle(request, trace, tmp_path_factory) -> Bundle:
    out = tmp_path_factory.mktemp("first") / "b"
    fit(TraceData(trace), PredictorModule(NETWORKS[request.param], learning_rate=0.01), out, STEPS)
    return Bundle.open(out)


@pytest.fixture(scope="module")
def further(write, tmp_path_factory):
    """Write other sequences in which every fourth token has an id that the first trace has not."""
    path = write(tmp_path_factory.mktemp("further") / "t.npz", sequences=20, seed=7)
    with np.load(path) as file:
        arrays = dict(file)
    arrays["token_ids"] = np.where(np.arange(len(arrays["token_ids"])) % 4, arrays["token_ids"], 60).astype(np.int32)
    np.savez(path, **arrays)
    return path


def test_going_on_with_the_same_trace_starts_at_the_bundles_recall(bundle, trace, no_export, tmp_path):
    data, module = TraceData(trace), PredictorModule(network_of(bundle), learning_rate=0.0)
    fit(data, module, tmp_path / "b", FitSettings(max_steps=1, validate_steps=1), init=bundle)
    seen = bundle.training_sequences()
    assert seen == {fingerprint(row) for row in data.fitting_rows} == set(module.seen.tolist())
    assert len(data.rows["test"]) == bundle.card["training"]["sequences"]["test"]
    predictor = load_predictor(bundle)
    wanted = measure(predictor, data.rows["validation"]).recall(own_k(predictor))
    assert float(module.trainer.callback_metrics["validation_recall"]) == pytest.approx(wanted, abs=1e-6)


def test_new_tokens_get_rows_that_start_as_the_unknown_one(bundle, further, tmp_path):
    data, module = TraceData(further), PredictorModule(network_of(bundle))
    start_from_bundle(module, data, bundle)
    network = module.network
    before, after = known_ids(bundle_weights(bundle)), known_ids(network.state_dict())
    assert (bundle.spec.vocab_size, network.spec.vocab_size) == (40, 61)
    assert after.tolist() == [*before.tolist(), 60]
    table = network.embedding.table.weight  # pyright: ignore
    assert table[-2].equal(table[-1])
    predictor = load_predictor(bundle)  # which has never heard of token 60
    wanted = measure(predictor, data.rows["test"]).recall(own_k(predictor))
    again = load_predictor(write_bundle(tmp_path / "grown", network.eval()))
    # not to the last bit: an id that was beyond the vocabulary can now be told from others that were
    assert measure(again, data.rows["test"]).recall(own_k(again)) == pytest.approx(wanted, abs=0.02)


def test_a_continued_bundle_knows_both_traces(bundle, further, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["train", "--trace", str(further), "--init", str(bundle.path), "--out", "c", "--tracker", "none"]
    assert main([*words, "--fit.max_steps", "10", "--model.learning_rate", "0.01", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["family"] == bundle.spec.family
    continued, data = Bundle.open("c"), TraceData(further)
    assert continued.training_sequences() == bundle.training_sequences() | {fingerprint(r) for r in data.fitting_rows}
    assert continued.card["training"]["init"] == "b"
    assert continued.card["settings"] == bundle.card["settings"]
    assert main(["export", "c.run/last.ckpt", "--out", "d", "--json"]) == 0
    assert Bundle.open("d").training_sequences() == continued.training_sequences()


def test_sequences_that_were_learned_from_are_no_test(bundle, trace):
    seen = bundle.training_sequences()
    for seed in range(20):  # the first other split some of whose test sequences the bundle was trained on
        data, module = TraceData(trace, split=SplitSettings(seed=seed)), PredictorModule(network_of(bundle))
        data.setup()
        before = list(data.rows["test"])
        if 0 < sum(fingerprint(row) in seen for row in before) < len(before):
            break
    start_from_bundle(module, data, bundle)
    left = {row.sequence for row in data.rows["test"]}
    assert left == {row.sequence for row in before if fingerprint(row) not in seen}
    assert 0 < len(left) < len(before)
    with pytest.raises(DataError, match=r"has learned from all \d+ test sequences of .* before; give another trace"):
        data.leave_out(np.array([fingerprint(row) for row in before]))


def test_other_models_and_other_networks_are_refused(bundle, trace, tmp_path, capsys):
    ids = np.tile(np.arange(20, dtype=np.int32), 6)
    experts = np.random.default_rng(0).integers(0, 9, (120, 3, 1)).astype(np.uint8)
    np.savez(tmp_path / "o.npz", experts=experts, offsets=np.arange(0, 121, 12), token_ids=ids)
    with pytest.raises(BundleError, match=r"predicts a model with .* train one on a trace of this model"):
        start_from_bundle(PredictorModule(network_of(bundle)), TraceData(tmp_path / "o.npz"), bundle)
    words = ["train", "--trace", str(trace), "--out", str(tmp_path / "c"), "--tracker", "none"]
    name = "foregate.predictors.sru_attention.SruAttentionSettings"
    other = ["--model.network", name, "--model.network.hidden", "64"]
    assert main([*words, "--init", str(bundle.path), *other]) == 2
    err = capsys.readouterr().err
    assert "model.network is given and --init" in err
    assert err.count("\n") == 1
    assert main([*words, "--init", "nowhere"]) == 1
    assert "nowhere is no predictor bundle" in capsys.readouterr().err
    assert not (tmp_path / "c").exists()


def test_a_run_inside_of_its_bundle_is_refused(trace, tmp_path, capsys):
    for place in (tmp_path / "b", tmp_path / "b" / "run"):
        code = main(["train", "--trace", str(trace), "--out", str(tmp_path / "b"), "--run-dir", str(place)])
        assert code == 2
        assert "--run-dir must lie outside of the bundle's folder" in capsys.readouterr().err
        assert not (tmp_path / "b").exists()
