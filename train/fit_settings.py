"""How long, how often checked, and on what a predictor is trained. Knows what is legal; loads nothing."""

from __future__ import annotations

from dataclasses import dataclass

from ..collect.errors import SettingError

MOST = 1e9  # minutes, steps and the like; what no number and infinity are not below


@dataclass(frozen=True, kw_only=True)
class FitSettings:
    """How long and where a predictor is trained."""

    max_minutes: float = 10.0
    """Training time over all resumed parts; export follows."""
    max_steps: int = -1
    """Optimizer steps; -1 for no limit."""
    max_epochs: int = 60
    """Passes over the training sequences."""
    seed: int = 0
    """Seed of weights and dropout; the split has its own."""
    validate_steps: int = 50
    """Steps from one validation, and checkpoint, to the next."""
    patience: int = 12
    """Validations without a better recall after which training stops."""
    clip: float = 1.0
    """Largest norm of the gradient."""
    accelerator: str = "auto"
    """Lightning accelerator: auto, cpu, gpu or mps."""
    precision: str = "32-true"
    """Lightning precision."""

    def __post_init__(self) -> None:
        for name in ("max_minutes", "max_epochs", "validate_steps", "patience", "clip"):
            if not 0 < getattr(self, name) <= MOST:
                raise SettingError(f"{name} must be positive, got {getattr(self, name)}.")
        if self.max_steps != -1 and self.max_steps < 1:
            raise SettingError(f"max_steps must be -1 or at least 1, got {self.max_steps}.")
