"""Training a shadow: from a model's folder, its own weights untouched, out of a bundle that needs the model no more."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import torch
from foregate.collect import tiny_models
from foregate.collect.architectures import topology_of
from foregate.collect.errors import ModelError
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


def test_a_model_that_is_not_there_is_refused(encoder, tmp_path):
    module = PredictorModule(ShadowSettings(model=str(tmp_path / "none")))
    with pytest.raises(ModelError, match="There is no model folder"):
        fit(TraceData(encoder / "trace", stack="encoder"), module, tmp_path / "bundle", LIMITS)
    assert not (tmp_path / "bundle").exists()
