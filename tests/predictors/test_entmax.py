"""Entmax-1.5 against a slow solution and, with sparsemax, against the `entmax` package; attention with each."""

import numpy as np
import pytest
import torch
from foregate.collect.errors import SettingError
from foregate.predictors.entmax import ATTENTION_WEIGHTS, entmax15
from foregate.predictors.sparse_attention import SparseAttention
from foregate.predictors.sparsemax import MASKED, sparsemax
from foregate.predictors.sru_attention import SruAttentionSettings
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

SCORES = arrays(np.float64, st.integers(1, 12), elements=st.floats(-20, 20, width=32))


def solve_slowly(scores: np.ndarray) -> np.ndarray:
    """Find tau by bisection."""
    halves = scores / 2
    low, high = halves.max() - 1, halves.max()
    for _ in range(200):
        tau = (low + high) / 2
        if (np.maximum(halves - tau, 0) ** 2).sum() > 1:
            low = tau
        else:
            high = tau
    return np.maximum(halves - low, 0) ** 2


@settings(deadline=None, max_examples=200)
@given(SCORES)
def test_is_what_bisection_finds(scores):
    weights = entmax15(torch.from_numpy(scores)).numpy()
    assert np.all(weights >= 0)
    np.testing.assert_allclose(weights.sum(), 1, atol=1e-9)
    np.testing.assert_allclose(weights, solve_slowly(scores), atol=1e-7)


@pytest.mark.parametrize("spread", [0.1, 1.0, 5.0])
@pytest.mark.parametrize("name", ["sparsemax", "entmax15"])
def test_equals_the_entmax_package(name, spread):
    package = pytest.importorskip("entmax")
    torch.manual_seed(0)
    values = spread * torch.randn(5, 7, 33, dtype=torch.float64)
    ours, theirs = (values.clone().requires_grad_() for _ in range(2))
    weights, wanted = ATTENTION_WEIGHTS[name](ours), getattr(package, name)(theirs, dim=-1)
    torch.testing.assert_close(weights, wanted, atol=1e-9, rtol=0)
    asked = torch.randn_like(weights)
    (gradient,) = torch.autograd.grad((weights * asked).sum(), ours)
    (wanted,) = torch.autograd.grad((wanted * asked).sum(), theirs)
    torch.testing.assert_close(gradient, wanted, atol=1e-7, rtol=0)


def test_gradient():
    torch.manual_seed(0)
    scores = torch.randn(6, 9, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(entmax15, (scores,))


@pytest.mark.parametrize("name", ATTENTION_WEIGHTS)
def test_masked_entries_get_nothing(name):
    weigh = ATTENTION_WEIGHTS[name]
    torch.manual_seed(0)
    scores = torch.randn(40, 8)
    masked = scores.clone()
    masked[:, 5:] = MASKED
    torch.testing.assert_close(weigh(masked)[:, :5], weigh(scores[:, :5]))
    assert (weigh(masked)[:, 5:] == 0).all()
    assert torch.isfinite(weigh(torch.full((2, 3), MASKED))).all()


def test_is_sparser_than_softmax_and_denser_than_sparsemax():
    torch.manual_seed(0)
    scores = 2 * torch.randn(200, 16)
    zeros = [int((ATTENTION_WEIGHTS[name](scores) == 0).sum()) for name in ("softmax", "entmax15", "sparsemax")]
    assert zeros == sorted(zeros)
    assert 0 == zeros[0] < zeros[1] < zeros[2]


@pytest.mark.parametrize("name", ATTENTION_WEIGHTS)
@torch.no_grad()
def test_attention_steps_as_its_band(name):
    torch.manual_seed(0)
    attention = SparseAttention(6, 4, 3, name)
    attention.age_W.normal_()
    hidden, ring = 3 * torch.randn(2, 8, 6), attention.ring(2)
    whole, last = attention.band(hidden, ring)
    for t in range(8):
        given, ring = attention.step(hidden[:, t], ring)
        torch.testing.assert_close(given, whole[:, t])
    torch.testing.assert_close(ring, last)
    if name != "sparsemax":
        plain = SparseAttention(6, 4, 3)
        plain.load_state_dict(attention.state_dict())
        assert not torch.allclose(plain.band(hidden, plain.ring(2))[0], whole)


def test_settings_name_it():
    assert SruAttentionSettings().attention_weights == "sparsemax"
    with pytest.raises(SettingError, match="attention_weights must be one of sparsemax, entmax15, softmax, got 'hard'"):
        SruAttentionSettings(attention_weights="hard")  # pyright: ignore[reportArgumentType]


def test_sparsemax_is_the_default():
    assert SparseAttention(4, 4, 2).weigh is sparsemax
