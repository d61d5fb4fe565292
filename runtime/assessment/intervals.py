"""How far a share over tokens would move with other sequences. Knows sums per sequence, nothing of what they count."""

# N sequences

from __future__ import annotations

import numpy as np

CONFIDENCE = 0.95
RESAMPLES = 1000


def ratio(part: np.ndarray | float, whole: np.ndarray | float) -> float | None:
    """Give sum(part) / sum(whole), None where the whole is nothing."""
    total = float(np.sum(whole))
    return float(np.sum(part)) / total if total else None


def ratio_interval(part_N: np.ndarray, whole_N: np.ndarray, seed: int = 0) -> list[float] | None:
    """Give the bootstrap interval of sum(part) / sum(whole) over sequences, [low, high]; None for fewer than two."""
    kept = np.asarray(whole_N) > 0
    part, whole = np.asarray(part_N, np.float64)[kept], np.asarray(whole_N, np.float64)[kept]
    if len(whole) < 2:
        return None
    weights = np.random.default_rng(seed).multinomial(len(whole), np.full(len(whole), 1 / len(whole)), size=RESAMPLES)
    draws = (weights @ part) / (weights @ whole)
    low, high = np.quantile(draws, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return [float(low), float(high)]
