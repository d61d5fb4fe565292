"""Sparsemax against a slow projection onto the simplex."""

import numpy as np
import torch
from foregate.predictors.sparsemax import MASKED, sparsemax
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

SCORES = arrays(np.float64, st.integers(1, 12), elements=st.floats(-20, 20, width=32))


def project_slowly(scores: np.ndarray) -> np.ndarray:
    """Find tau by bisection."""
    low, high = scores.min() - 1, scores.max()
    for _ in range(200):
        tau = (low + high) / 2
        if np.maximum(scores - tau, 0).sum() > 1:
            low = tau
        else:
            high = tau
    return np.maximum(scores - low, 0)


@settings(deadline=None, max_examples=200)
@given(SCORES)
def test_is_the_projection_onto_the_simplex(scores):
    weights = sparsemax(torch.from_numpy(scores)).numpy()
    assert np.all(weights >= 0)
    np.testing.assert_allclose(weights.sum(), 1, atol=1e-12)
    np.testing.assert_allclose(weights, project_slowly(scores), atol=1e-9)


@settings(deadline=None, max_examples=50)
@given(SCORES, st.floats(-100, 100, width=32))
def test_ignores_a_shift(scores, shift):
    np.testing.assert_allclose(
        sparsemax(torch.from_numpy(scores)).numpy(), sparsemax(torch.from_numpy(scores + shift)).numpy(), atol=1e-9
    )


def test_gradient():
    torch.manual_seed(0)
    scores = torch.randn(6, 9, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(sparsemax, (scores,))


def test_masked_entries_get_nothing():
    scores = torch.randn(4, 8)
    masked = scores.clone()
    masked[:, 5:] = MASKED
    torch.testing.assert_close(sparsemax(masked)[:, :5], sparsemax(scores[:, :5]))
    assert (sparsemax(masked)[:, 5:] == 0).all()
    assert torch.isfinite(sparsemax(torch.full((2, 3), MASKED))).all()
