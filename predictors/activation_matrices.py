"""Expert activation matrices: how often each expert was used in a request, [L, E], as shares of each layer's uses.

Knows arrays and rows of a trace; knows no predictor. scikit-learn is imported where there is something to cluster.
"""

# R matrices (requests), L MoE layers, E experts

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from ..collect.topology import MoeTopology
from ..collect.trace import SequenceRouting
from .rows import dense

Members = Literal["nearest", "centres"]
LEAST = 1e-6  # probability of an expert that no request like this one used
MANY = 10_000  # matrices from which on clusters are found by mini-batches: whole passes would take minutes


def activation_matrix(row: SequenceRouting, topology: MoeTopology, num_experts: int) -> np.ndarray:
    """Count how often a sequence used each expert: float32 [L, E]."""
    experts = dense(row, topology)
    num_layers = experts.shape[1]
    flat = (experts.astype(np.int64) + np.arange(num_layers)[:, None] * num_experts)[experts >= 0]
    return np.bincount(flat, minlength=num_layers * num_experts).reshape(num_layers, -1).astype(np.float32)


def row_shares(matrices: np.ndarray) -> np.ndarray:
    """Divide each layer [..., E] by its sum; layers without any use stay 0."""
    return matrices / np.maximum(matrices.sum(-1, keepdims=True), 1e-9)


def cosines(matrix_LE: np.ndarray, others_RLE: np.ndarray) -> np.ndarray:
    """Give the cosine of a matrix with each of others, [R], over the layers that the matrix has uses in."""
    seen_L = matrix_LE.sum(-1) > 0
    one, many = matrix_LE[seen_L].ravel(), others_RLE[:, seen_L].reshape(len(others_RLE), -1)
    return many @ one / np.maximum(np.linalg.norm(many, axis=1) * np.linalg.norm(one), 1e-9)


def collect_matrices(
    rows: Sequence[SequenceRouting],
    topology: MoeTopology,
    num_experts: int,
    *,
    capacity: int,
    members: Members = "nearest",
    seed: int = 0,
) -> np.ndarray:
    """Choose at most `capacity` matrices that stand for the rows' own: float32 [R, L, E], shares.

    All of them where they are few enough; else one for each cluster: the member nearest to its centre, or the centre.
    """
    shares = row_shares(np.stack([activation_matrix(row, topology, num_experts) for row in rows]))
    if len(shares) <= capacity:
        return shares
    points = shares.reshape(len(shares), -1)
    centres = _centres(points, capacity, seed)
    if members == "nearest":
        squares = (points**2).sum(1)[None] - 2 * centres @ points.T  # of the distance, less what a centre adds to all
        return shares[np.unique(squares.argmin(1))]
    return centres.reshape(-1, *shares.shape[1:])


def _centres(points: np.ndarray, num_clusters: int, seed: int) -> np.ndarray:
    """Cluster points [R, X] by k-means and give the centres [num_clusters, X]."""
    from sklearn.cluster import KMeans, MiniBatchKMeans

    kind: Any = KMeans if len(points) < MANY else MiniBatchKMeans
    found = kind(n_clusters=num_clusters, n_init=1, random_state=seed).fit(points)
    return found.cluster_centers_.astype(np.float32)
