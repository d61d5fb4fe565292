"""Which share of the accesses the most used experts serve. Knows rows of a trace; knows no caches or time.

The hot set is chosen on other sequences than it is measured on: whole groups are dealt alternately to two halves, each
measured with the hot set of the other. The in-sample number stands beside it, since it is what others report.
"""

# N experts of the whole model, in flat order

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ...collect.topology import MoeTopology
from ...collect.trace import SequenceRouting
from ...predictors.rows import group_of
from .load import layers_with_experts, load_of

SHARES = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.75)


def covered(fitted_N: np.ndarray, measured_N: np.ndarray, num_hot: int) -> int:
    """Count the accesses to the experts that are hottest in `fitted`; ties go to the smallest flat index."""
    hottest = np.argsort(-fitted_N, kind="stable")[:num_hot]
    return int(measured_N[hottest].sum())


def flat_load(rows: Sequence[SequenceRouting], topology: MoeTopology) -> np.ndarray:
    """Count the accesses to every expert of the model, int64 [N] in flat order."""
    load_LE = load_of(rows, topology)
    return np.concatenate([load_LE[index, : layer.num_experts] for index, layer in enumerate(topology.layers)])


def halves(rows: Sequence[SequenceRouting]) -> tuple[list[SequenceRouting], list[SequenceRouting]]:
    """Deal groups alternately to two halves; the second is empty where there is one group only."""
    groups = list(dict.fromkeys(map(group_of, rows)))
    first = set(groups[::2])
    return [row for row in rows if group_of(row) in first], [row for row in rows if group_of(row) not in first]


def hot_set_coverage(
    rows: Sequence[SequenceRouting], topology: MoeTopology, shares: Sequence[float] = SHARES
) -> list[dict[str, Any]]:
    """Give the coverage of the hottest experts.

    Returns:
        per share "share", "experts", "held_out" (None where there is one group only, or where the halves have experts
        in different layers), "in_sample"; both are shares of the accesses, and uniform routing would give the share
        itself.
    """
    dealt = halves(rows)
    one, other = (flat_load(half, topology) for half in dealt)
    comparable = layers_with_experts(dealt[0], topology) == layers_with_experts(dealt[1], topology)
    both = one + other
    found = []
    for share in shares:
        num_hot = max(1, int(share * topology.num_experts))
        crossed = covered(one, other, num_hot) + covered(other, one, num_hot)
        found.append(
            {
                "share": share,
                "experts": num_hot,
                "held_out": crossed / int(both.sum()) if comparable and one.any() else None,
                "in_sample": covered(both, both, num_hot) / int(both.sum()) if both.any() else None,
            }
        )
    return found
