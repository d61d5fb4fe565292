"""How much of a token's experts the tokens before it used too. Knows rows of a trace; knows no caches.

Two levels stand beside each share: what independent, uniform routing would give, and what independent routing with the
recorded popularity would give. Only what lies above both is locality that a cache or the previous token can use.
"""

# T tokens, E experts of a layer, w window

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ...collect.topology import MoeTopology
from ...collect.trace import SequenceRouting
from .intervals import ratio, ratio_interval

WINDOWS = (1, 4, 16)  # the previous token; a phrase; a sentence


def used_before(experts_TK: np.ndarray, num_experts: int, window: int) -> tuple[int, int]:
    """Count one sequence's uses in one layer that one of the `window` tokens before made too, and all uses.

    Only tokens with `window` predecessors are counted; a token that names an expert twice uses it once.
    """
    num_tokens = len(experts_TK)
    if num_tokens <= window:
        return 0, 0
    hot_TE = np.zeros((num_tokens, num_experts + 1), np.int32)
    np.put_along_axis(hot_TE, experts_TK.astype(np.int64), 1, axis=1)  # -1 writes the last column
    hot_TE = hot_TE[:, :-1]
    until_TE = np.concatenate([np.zeros((1, num_experts), np.int32), np.cumsum(hot_TE, axis=0, dtype=np.int32)])
    recent = until_TE[window:-1] > until_TE[: -window - 1]  # row i: tokens i .. i + w - 1
    wanted = hot_TE[window:] > 0
    return int((recent & wanted).sum()), int(wanted.sum())


def chance(top_k: int, num_experts: int, window: int) -> float:
    """Give the overlap of independent, uniform routing: 1 - (1 - k/E)^w."""
    return 1 - (1 - top_k / num_experts) ** window


def popularity_level(uses_E: np.ndarray, num_tokens: int, window: int) -> float | None:
    """Give the overlap of independent routing whose tokens use expert e with probability uses_e / tokens."""
    if not num_tokens or not uses_E.sum():
        return None
    p_E = np.minimum(uses_E / num_tokens, 1.0)
    return float((p_E * (1 - (1 - p_E) ** window)).sum() / p_E.sum())


def overlaps(
    rows: Sequence[SequenceRouting], topology: MoeTopology, windows: Sequence[int] = WINDOWS
) -> list[dict[str, Any]]:
    """Give the overlap for each window.

    Returns:
        per window "window", "overlap" (all layers together), "interval" (over sequences), "chance", "popularity", and
        "layers": one {"layer", "overlap", "chance", "popularity"} each; None where no sequence is long enough.
    """
    num_layers = topology.num_layers
    uses_LE = np.zeros((num_layers, topology.max_experts))
    tokens_L = np.zeros(num_layers, np.int64)
    part = np.zeros((len(windows), num_layers, len(rows)), np.int64)
    whole = np.zeros_like(part)
    for number, row in enumerate(rows):
        for layer, experts in zip(topology.layers_of(row.stack), row.layer_experts(topology), strict=True):
            num_experts = topology.layers[layer].num_experts
            uses_LE[layer, :num_experts] += np.bincount(experts[experts >= 0].ravel(), minlength=num_experts)
            if (experts >= 0).any():  # a layer that was not logged here says nothing of how often experts are used
                tokens_L[layer] += row.num_tokens
            for index, window in enumerate(windows):
                part[index, layer, number], whole[index, layer, number] = used_before(experts, num_experts, window)
    found = []
    for index, window in enumerate(windows):
        layers = [
            {
                "layer": number,
                "overlap": ratio(part[index, number], whole[index, number]),
                "chance": chance(layer.top_k, layer.num_experts, window),
                "popularity": popularity_level(uses_LE[number], int(tokens_L[number]), window),
            }
            for number, layer in enumerate(topology.layers)
        ]
        weights = whole[index].sum(axis=1)  # a layer counts as often as it was measured, in the levels too
        found.append(
            {
                "window": window,
                "overlap": ratio(part[index], whole[index]),
                "interval": ratio_interval(part[index].sum(axis=0), whole[index].sum(axis=0)),
                "chance": _weighted([layer["chance"] for layer in layers], weights),
                "popularity": _weighted([layer["popularity"] for layer in layers], weights),
                "layers": layers,
            }
        )
    return found


def _weighted(values: list[float | None], weights: np.ndarray) -> float | None:
    pairs = [(value, weight) for value, weight in zip(values, weights, strict=True) if value is not None]
    total = sum(weight for _, weight in pairs)
    return float(sum(value * weight for value, weight in pairs) / total) if total else None
