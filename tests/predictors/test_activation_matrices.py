"""Activation matrices: counted, compared over the layers seen, and clustered where they are too many."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from foregate.collect.topology import MoeLayer, MoeTopology
from foregate.collect.trace import SequenceRouting
from foregate.predictors import activation_matrices
from foregate.predictors.activation_matrices import activation_matrix, collect_matrices, cosines, row_shares

UNEVEN = MoeTopology(
    layers=tuple(MoeLayer(stack="causal", block=i, num_experts=e, top_k=k) for i, (e, k) in enumerate([(2, 1), (3, 2)]))
)
PAIRS = MoeTopology.uniform(1, 4, 1)


def test_counts_by_hand():
    row = SequenceRouting(sequence="s", experts=np.array([[0, 2, 1], [1, 2, 0], [1, 2, -1]], dtype=np.int16))
    found = activation_matrix(row, UNEVEN, 3)
    np.testing.assert_array_equal(found, [[1, 2, 0], [1, 1, 3]])
    np.testing.assert_allclose(row_shares(found), [[1 / 3, 2 / 3, 0], [0.2, 0.2, 0.6]], rtol=1e-6)
    np.testing.assert_array_equal(row_shares(np.zeros((2, 3))), np.zeros((2, 3)))


def test_cosines_leave_out_layers_without_uses():
    one = np.array([[3.0, 4.0], [0, 0]])
    others = np.array([[[3.0, 4.0], [1, 0]], [[4.0, -3.0], [0, 9]], [[6.0, 8.0], [5, 5]]])
    np.testing.assert_allclose(cosines(one, others), [1, 0, 1], atol=1e-9)
    np.testing.assert_array_equal(cosines(np.zeros((2, 2)), others), [0, 0, 0])


def rows_of(groups: list[tuple[int, int]]) -> list[SequenceRouting]:
    """Give top-1 rows of ten tokens: of each group (first expert, how often it is used), three that differ a little."""
    rows = []
    for expert, often in groups:
        for more in (0, 1, 2):
            experts = np.array([expert] * (often + more) + [3] * (10 - often - more), dtype=np.int16)[:, None]
            rows.append(SequenceRouting(sequence=f"{expert} {more}", experts=experts))
    return rows


def test_keeps_all_while_there_is_room(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)  # nothing is clustered
    rows = rows_of([(0, 7), (1, 7)])
    found = collect_matrices(rows, PAIRS, 4, capacity=6)
    np.testing.assert_array_equal(found, [row_shares(activation_matrix(row, PAIRS, 4)) for row in rows])


def check_clusters(members: str) -> None:
    rows = rows_of([(0, 7), (1, 7), (2, 7)])
    own = row_shares(np.stack([activation_matrix(row, PAIRS, 4) for row in rows]))
    found = collect_matrices(rows, PAIRS, 4, capacity=3, members=members, seed=1)  # pyright: ignore[reportArgumentType]
    order = np.argsort(found[:, 0, :3].argmax(1))
    np.testing.assert_allclose(found[order], own[[1, 4, 7]], atol=1e-6)  # the middle one is its cluster's mean too
    assert found.dtype == np.float32


@pytest.mark.parametrize("members", ["nearest", "centres"])
def test_one_matrix_stands_for_each_cluster(members):
    check_clusters(members)


@pytest.mark.parametrize("members", ["nearest", "centres"])
def test_centres_are_taken_or_their_nearest_member(members, monkeypatch):
    def centres(points: np.ndarray, num_clusters: int, seed: int) -> np.ndarray:
        return points.reshape(num_clusters, 3, -1).mean(1)

    monkeypatch.setattr(activation_matrices, "_centres", centres)
    check_clusters(members)
