"""A temperature takes back what probabilities boast, adds what they are too timid for, and leaves honest ones."""

from __future__ import annotations

import numpy as np
import pytest
from foregate.predictors.calibration import CalibrationCurve, TemperatureFit, tempered


def drawn(temperature: float, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Give probabilities whose logits were divided by a temperature they should not have, and what came true."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(-1, 2, 100_000)
    used = (rng.random(100_000) < 1 / (1 + np.exp(-logits))).astype(np.float32)
    return (1 / (1 + np.exp(-logits * temperature))).astype(np.float32), used


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.5])
def test_the_temperature_is_found_and_mends_the_error(temperature):
    probabilities, used = drawn(temperature)
    fit = TemperatureFit()
    for start in range(0, 100_000, 7_000):
        fit.add(probabilities[start : start + 7_000], used[start : start + 7_000])
    assert fit.temperature() == pytest.approx(temperature, rel=0.03)
    before, after = CalibrationCurve(), CalibrationCurve()
    before.add(probabilities, used)
    after.add(tempered(probabilities, fit.temperature()), used)
    assert after.error() < 0.006
    assert before.error() > 0.03 or temperature == 1


def test_what_is_certain_stays_and_the_order_too():
    given = np.array([0, 1e-9, 0.1, 0.3, 0.9, 1], np.float32)
    cooled = tempered(given, 0.5)
    assert cooled.dtype == np.float32
    assert cooled[0] == 0
    assert cooled[-1] == pytest.approx(1, abs=1e-6)
    assert (np.diff(cooled) > 0).all()
    assert cooled[2] == pytest.approx(1 / (1 + 9**2))
    assert tempered(given, 1) is given


def test_the_surprise_is_that_of_the_definition():
    probabilities, used = drawn(1.0)
    fit = TemperatureFit()
    fit.add(probabilities, used)
    wanted = -np.mean(np.where(used == 1, np.log(probabilities), np.log1p(-probabilities)))
    assert fit.surprise(1) == pytest.approx(float(wanted), abs=1e-4)
    assert TemperatureFit().temperature() == 1
