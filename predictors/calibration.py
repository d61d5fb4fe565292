"""How far predicted probabilities can be trusted: the share of true uses among predictions of each size.

A temperature is one number that makes probabilities honest: logits are divided by it. Above 1 it takes back what was
boasted, below 1 it adds what was too timid; the order of experts stays.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

BINS = 20
LARGEST_LOGIT = 16.0  # probabilities nearer to 0 or 1 than 1e-7 count as that
LOGIT_BINS = 640  # of 0.05: no temperature tells probabilities so near apart
COLDEST, HOTTEST = 0.05, 20.0  # temperatures beyond these would make a step or a constant of any predictor


class CalibrationCurve:
    """Count predictions and true uses by predicted probability, in equal bins."""

    def __init__(self, bins: int = BINS) -> None:
        self.bins = bins
        self.predictions, self.uses = np.zeros(bins, dtype=np.int64), np.zeros(bins, dtype=np.int64)
        self.predicted = np.zeros(bins)

    def add(self, probabilities: np.ndarray, used: np.ndarray) -> None:
        """Add predictions and what came true (1 or 0), of equal shape."""
        flat = probabilities.ravel()
        places = np.minimum((flat * self.bins).astype(np.int64), self.bins - 1)
        self.predictions += np.bincount(places, minlength=self.bins)
        self.predicted += np.bincount(places, weights=flat, minlength=self.bins)
        self.uses += np.bincount(places, weights=used.ravel(), minlength=self.bins).astype(np.int64)

    def error(self) -> float:
        """Give the expected calibration error: the mean gap between predicted and true share, over predictions."""
        return float(np.abs(self.predicted - self.uses).sum() / max(1, self.predictions.sum()))

    def to_json(self) -> dict[str, Any]:
        """Give mean predicted and true share per bin (None where a bin is empty), counts, and the error."""

        def share(values: np.ndarray) -> list[float | None]:
            pairs = zip(values.tolist(), self.predictions.tolist(), strict=True)
            return [round(value / count, 6) if count else None for value, count in pairs]

        return {
            "predicted": share(self.predicted),
            "observed": share(self.uses.astype(float)),
            "predictions": self.predictions.tolist(),
            "expected_error": round(self.error(), 6),
        }


class TemperatureFit:
    """Collect predictions by their logit, and give the temperature under which what came true is most likely."""

    def __init__(self) -> None:
        self.predictions, self.uses = np.zeros(LOGIT_BINS), np.zeros(LOGIT_BINS)

    def add(self, probabilities: np.ndarray, used: np.ndarray) -> None:
        """Add predictions and what came true (1 or 0), of equal shape."""
        places = (_logits(probabilities.ravel()) + LARGEST_LOGIT) * (LOGIT_BINS / (2 * LARGEST_LOGIT))
        places = np.minimum(places.astype(np.int64), LOGIT_BINS - 1)
        self.predictions += np.bincount(places, minlength=LOGIT_BINS)
        self.uses += np.bincount(places, weights=used.ravel(), minlength=LOGIT_BINS)

    def surprise(self, temperature: float) -> float:
        """Give the mean negative log-likelihood of what came true, in nats."""
        width = 2 * LARGEST_LOGIT / LOGIT_BINS
        logits = (np.arange(LOGIT_BINS) + 0.5) * width - LARGEST_LOGIT
        scaled = logits / temperature
        unused = self.predictions - self.uses
        total = self.uses @ np.logaddexp(0, -scaled) + unused @ np.logaddexp(0, scaled)
        return float(total / max(1.0, self.predictions.sum()))

    def temperature(self) -> float:
        """Give the best temperature in COLDEST..HOTTEST; 1 where nothing was added."""
        if not self.predictions.any():
            return 1.0
        low, high = 1 / HOTTEST, 1 / COLDEST  # the surprise is convex in 1 / temperature
        golden = (math.sqrt(5) - 1) / 2
        for _ in range(60):
            left, right = high - golden * (high - low), low + golden * (high - low)
            if self.surprise(1 / left) <= self.surprise(1 / right):
                high = right
            else:
                low = left
        return 2 / (low + high)


def tempered(probabilities: np.ndarray, temperature: float) -> np.ndarray:
    """Divide the logits of probabilities by a temperature; 0 stays 0, which says that there is no such expert."""
    if temperature == 1:
        return probabilities
    scaled = 1 / (1 + np.exp(_logits(probabilities) / -temperature))
    return np.where(probabilities > 0, scaled, 0).astype(probabilities.dtype)


def _logits(probabilities: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore"):  # 0 and 1 have infinite logits, which are cut
        logits = np.log(probabilities) - np.log1p(-np.minimum(probabilities, 1))
    return np.clip(logits, -LARGEST_LOGIT, LARGEST_LOGIT)
