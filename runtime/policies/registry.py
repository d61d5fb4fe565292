"""Eviction policies by name: what `--policies` takes, and how each is made for a replay."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from ...collect.errors import SettingError
from ...collect.topology import MoeTopology
from ...collect.wording import ending
from .activation import Activation
from .base import EvictionPolicy
from .belady import Belady
from .layer_lru import LayerLru
from .lfru import Lfru
from .lfu import Lfu
from .lru import Lru
from .predicted import Predicted
from .random import Random
from .s3fifo import S3Fifo
from .static import Static

PolicyName = Literal[
    "lru", "lfu", "lfru", "s3fifo", "layer_lru", "static", "activation", "random", "belady", "predicted"
]


@dataclass(frozen=True, kw_only=True, eq=False)
class PolicySetting:
    """Hold what a policy may want to know before the first event."""

    topology: MoeTopology
    """MoE layers of the model."""
    capacity: int
    """Experts that the cache holds."""
    future: Iterable[tuple[int, ...]] = ()
    """The needed experts of every event to come, for the optimum."""
    load: np.ndarray | None = None
    """Uses of each expert [all experts] that a static policy is fitted on."""
    seed: int = 0
    """Seed of what is drawn."""


def _static(setting: PolicySetting) -> EvictionPolicy:
    if setting.load is None:
        raise SettingError("The policy 'static' needs a load to take its hot set from, and got none.")
    return Static(setting.load, setting.topology, setting.capacity)


POLICIES: dict[PolicyName, Callable[[PolicySetting], EvictionPolicy]] = {
    "lru": lambda setting: Lru(),
    "lfu": lambda setting: Lfu(),
    "lfru": lambda setting: Lfru(setting.topology),
    "s3fifo": lambda setting: S3Fifo(setting.capacity),
    "layer_lru": lambda setting: LayerLru(setting.topology, setting.capacity),
    "static": _static,
    "activation": lambda setting: Activation(setting.topology),
    "random": lambda setting: Random(setting.topology, setting.seed),
    "belady": lambda setting: Belady(setting.future),
    "predicted": lambda setting: Predicted(setting.topology),
}
assert tuple(POLICIES) == get_args(PolicyName)

SIMULATED = tuple(name for name in POLICIES if name != "predicted")  # without forecasts it would be another policy


def check_policies(names: Iterable[str], *, foreseen: bool = False) -> None:
    """Refuse names that a replay of a trace does not know.

    Args:
        foreseen: whether there are forecasts.

    Raises:
        SettingError: for the first such name.
    """
    known = tuple(POLICIES) if foreseen else SIMULATED
    for name in names:
        if name in known:
            continue
        legal, why = ", ".join(known), ending(name, known)
        if name in POLICIES:
            why = ", which evicts by a predictor's forecasts; foregate simulate --predictor BUNDLE makes them."
        raise SettingError(f"policies must be of {legal}, got {name!r}{why}")


def make_policy(name: str, setting: PolicySetting) -> EvictionPolicy:
    """Make a policy by name.

    Raises:
        SettingError: if there is no such policy.
    """
    check_policies([name])
    return POLICIES[name](setting)  # pyright: ignore[reportArgumentType]
