"""Training a shadow: from a model's folder, its own weights untouched, out of a bundle that needs the model no more."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch
from foregate.collect import tiny_models
from foregate.collect.architectures import topology_of
from foregate.collect.errors import ModelError, SettingError
from foregate.collect.trace import SequenceRouting, TraceHeader
from foregate.collect.writer import TraceWriter
from foregate.predictors.bundle import Bundle, load_predictor
from foregate.predictors.shadow import ShadowSettings
from foregate.train.data import TraceData
from foregate.train.fit import FitSettings, fit
from foregate.train.module import PredictorModule

LIMITS = FitSettings(max_steps=6, validate_steps=3)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    """A tiny Switch model in a folder, and a trace of its encoder."""
    folder = tmp_path_factory.mktemp("switch")
    model = tiny_models.build("switch_transformers")
    model.save_pretrained(folder / "model")
    tiny_models.tokenizer().save_pretrained(folder / "model")
    rng = np.random.default_rng(0)
    header = TraceHeader(topology=topology_of(model), vocab_size=model.config.vocab_size)
    with TraceWriter(folder / "trace", header) as writer:
        for index in range(20):
            ids = rng.integers(3, 100, 12)
            rows = {}
            for stack in ("encoder", "decoder"):
                chosen = rng.integers(0, 8, (len(ids), 2)).astype(np.int16)
                rows[stack] = SequenceRouting(
                    sequence=str(index), stack=stack, token_ids=ids.astype(np.int32), experts=chosen
                )
            writer.write(*rows.values())
    return folder


def test_a_shadow_trains_beside_what_the_model_gave(encoder, tmp_path):
    torch.set_num_threads(1)
    source = tmp_path / "model"
    shutil.copytree(encoder / "model", source)
    settings = ShadowSettings(hidden=32, heads=4, head_width=8, feed_forward=6, model=str(source), link="softmax")
    module = PredictorModule(settings)
    result = fit(TraceData(encoder / "trace", stack="encoder"), module, tmp_path / "bundle", LIMITS)
    assert (result["family"], result["horizon"]) == ("shadow", "batch")
    weights = {name: value for name, value in module.network.named_parameters() if not value.requires_grad}
    fresh = settings.build(module.network.spec, np.arange(3))
    fresh.start_from_model(tiny_models.build("switch_transformers"))
    for name, value in fresh.named_parameters():
        if name in weights:
            torch.testing.assert_close(weights[name], value, atol=0, rtol=0)
    shutil.rmtree(source)  # a bundle is whole without the model
    said = load_predictor(Bundle.open(tmp_path / "bundle")).predict(np.array([[5, 6, 7]]), np.ones((1, 3), bool))
    assert said.shape == (1, 3, 2, 8)
    np.testing.assert_allclose(said.sum(-1), 1, atol=1e-4)


def test_what_the_model_gave_stays_wherever_training_goes_on(encoder, tmp_path):
    settings = ShadowSettings(
        hidden=32, heads=4, head_width=8, feed_forward=6, model=str(encoder / "model"), link="softmax"
    )
    places = {"run_dir": tmp_path / "run"}
    fit(TraceData(encoder / "trace", stack="encoder"), PredictorModule(settings), tmp_path / "first", LIMITS, **places)
    further = {"resumed": {"resume": True, **places}, "continued": {"init": Bundle.open(tmp_path / "first")}}
    fresh = settings.build(Bundle.open(tmp_path / "first").spec, np.arange(3))
    fresh.start_from_model(tiny_models.build("switch_transformers"))
    given = {name: value for name, value in fresh.named_parameters() if not value.requires_grad}
    assert len(given) > 10
    for name, how in further.items():
        module = PredictorModule(settings)
        limits = FitSettings(max_steps=12, validate_steps=6)
        fit(TraceData(encoder / "trace", stack="encoder"), module, tmp_path / name, limits, **how)
        found = dict(module.network.named_parameters())
        assert all(torch.equal(found[parameter], value) for parameter, value in given.items()), name


def test_another_model_than_the_traces_is_refused(encoder, tmp_path):
    path = tmp_path / "trace"
    shutil.copytree(encoder / "trace", path)
    header = json.loads((path / "trace.json").read_text())
    (path / "trace.json").write_text(json.dumps(header | {"model_fingerprint": "0123456789abcdef"}))
    settings = ShadowSettings(hidden=32, heads=4, head_width=8, feed_forward=6, model=str(encoder / "model"))
    with pytest.raises(SettingError, match="was recorded from"):
        fit(TraceData(path, stack="encoder"), PredictorModule(settings), tmp_path / "bundle", LIMITS)


def test_a_model_that_is_not_there_is_refused(encoder, tmp_path):
    module = PredictorModule(ShadowSettings(model=str(tmp_path / "none")))
    with pytest.raises(ModelError, match="There is no model folder"):
        fit(TraceData(encoder / "trace", stack="encoder"), module, tmp_path / "bundle", LIMITS)
    assert not (tmp_path / "bundle").exists()
