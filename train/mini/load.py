"""Expert load of MoE layers and intervals of accuracies. Pure numbers; knows no models.

Entropy share: entropy of the load over log E, 1 for an even load, 0 for one expert that takes everything.
Peak: load of the busiest expert over the mean.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

Z95 = 1.959964


def load_summary(counts_LE: np.ndarray, stacks: list[str]) -> list[dict[str, Any]]:
    """Describe the load of each MoE layer from token counts (L, E)."""
    rows = []
    for layer, (stack, counts) in enumerate(zip(stacks, counts_LE, strict=True)):
        share = counts / max(1, counts.sum())
        seen = share[share > 0]
        entropy = float(-(seen * np.log(seen)).sum())
        rows.append(
            {
                "layer": layer,
                "stack": stack,
                "entropy_share": round(entropy / math.log(len(counts)), 4),
                "peak": round(float(share.max() * len(counts)), 3),
                "unused_experts": int((counts == 0).sum()),
                "choices": int(counts.sum()),
            }
        )
    return rows


def accuracy_summary(correct: int, total: int, majority: int) -> dict[str, Any]:
    """Describe an accuracy with its 95 % Wilson interval beside that of the majority class."""
    share = correct / total
    middle = (share + Z95**2 / (2 * total)) / (1 + Z95**2 / total)
    half = Z95 * math.sqrt(share * (1 - share) / total + Z95**2 / (4 * total**2)) / (1 + Z95**2 / total)
    low, high = middle - half, middle + half
    return {
        "accuracy": round(share, 4),
        "interval_95": [round(low, 4), round(high, 4)],
        "majority_class": round(majority / total, 4),
        "examples": total,
        "at_chance": low <= majority / total,
    }
