"""How evenly a model's experts are used. Knows counts [L, E]; nothing of tokens, traces or caches."""

# L MoE layers, E experts of the largest layer

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from ...collect.topology import MoeTopology
from ...collect.trace import SequenceRouting
from .intervals import ratio


def load_of(rows: Iterable[SequenceRouting], topology: MoeTopology) -> np.ndarray:
    """Count how often every expert was chosen, int64 [L, E]; entries beyond a layer's own experts are 0."""
    load_LE = np.zeros((topology.num_layers, topology.max_experts), np.int64)
    for row in rows:
        for layer, experts in zip(topology.layers_of(row.stack), row.layer_experts(topology), strict=True):
            load_LE[layer] += np.bincount(experts[experts >= 0].ravel(), minlength=topology.max_experts)
    return load_LE


def layers_with_experts(rows: Iterable[SequenceRouting], topology: MoeTopology) -> set[int]:
    """Give the layers in which some row has an expert."""
    found: set[int] = set()
    for row in rows:
        parts = zip(topology.layers_of(row.stack), row.layer_experts(topology), strict=True)
        found |= {layer for layer, experts in parts if (experts >= 0).any()}
    return found


def dropped_of(rows: Iterable[SequenceRouting]) -> float | None:
    """Give the share of choices that were dropped or absent (-1)."""
    dropped = whole = 0
    for row in rows:
        dropped += int((row.experts < 0).sum())
        whole += row.experts.size
    return ratio(dropped, whole)


def balance(load_E: np.ndarray) -> dict[str, Any]:
    """Describe one layer's load.

    Returns:
        "entropy": of the shares, over ln E (1 = uniform; None for a layer of one expert); "effective_experts": e to
        the power of the entropy; "max_over_mean"; "gini" (0 = uniform); "never_used": share of the experts. All but
        the last are None where nothing was counted.
    """
    load = np.asarray(load_E, np.float64)
    num_experts, total = len(load), float(load.sum())
    never_used = float((load == 0).mean())
    if not total:
        return dict.fromkeys(("entropy", "effective_experts", "max_over_mean", "gini")) | {"never_used": never_used}
    share = load / total
    nats = max(0.0, float(-(share[share > 0] * np.log(share[share > 0])).sum()))
    ranks = np.arange(1, num_experts + 1)
    return {
        "entropy": nats / float(np.log(num_experts)) if num_experts > 1 else None,
        "effective_experts": float(np.exp(nats)),
        "max_over_mean": float(load.max() / load.mean()),
        "gini": float(((2 * ranks - num_experts - 1) * np.sort(load)).sum() / (num_experts * total)),
        "never_used": never_used,
    }


def balances(load_LE: np.ndarray, topology: MoeTopology) -> dict[str, Any]:
    """Describe every layer's load, and all layers together.

    Returns:
        "layers": one `balance` each, with "layer", "stack" and "experts"; "mean": of each number over the layers that
        have it; "never_used": share of the model's experts that no token chose.
    """
    layers = []
    for index, layer in enumerate(topology.layers):
        found = balance(load_LE[index, : layer.num_experts])
        layers.append({"layer": index, "stack": layer.stack, "experts": layer.num_experts, **found})
    mean = {}
    for name in ("entropy", "effective_experts", "max_over_mean", "gini"):
        values = [layer[name] for layer in layers if layer[name] is not None]
        mean[name] = float(np.mean(values)) if values else None
    unused = sum(layer["never_used"] * layer["experts"] for layer in layers)
    return {"layers": layers, "mean": mean, "never_used": unused / topology.num_experts}
