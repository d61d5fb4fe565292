"""How far predicted probabilities can be trusted: the share of true uses among predictions of each size."""

from __future__ import annotations

from typing import Any

import numpy as np

BINS = 20


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
