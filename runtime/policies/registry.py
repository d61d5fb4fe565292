"""Eviction policies by name: what `--policies` takes, and how each is made for a replay."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Literal, get_args

import numpy as np

from ...collect.errors import SettingError
from ...collect.topology import MoeTopology
from .base import EvictionPolicy
from .belady import Belady
from .lru import Lru
from .predicted import Predicted

PolicyName = Literal["lru", "belady", "predicted"]


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
    """Uses of each expert [all experts] in a part of the trace that a static policy was fitted on."""
    seed: int = 0
    """Seed of what is drawn."""


POLICIES: dict[PolicyName, Callable[[PolicySetting], EvictionPolicy]] = {
    "lru": lambda setting: Lru(),
    "belady": lambda setting: Belady(list(setting.future)),
    "predicted": lambda setting: Predicted(setting.topology),
}
assert tuple(POLICIES) == get_args(PolicyName)

SIMULATED = tuple(name for name in POLICIES if name != "predicted")  # without forecasts it would be another policy


def check_policies(names: Iterable[str]) -> None:
    """Refuse names that a replay of a trace does not know.

    Raises:
        SettingError: for the first such name.
    """
    for name in names:
        if name in SIMULATED:
            continue
        near = get_close_matches(name, SIMULATED, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise SettingError(f"There is no policy {name!r} to replay; {hint}Legal are {', '.join(SIMULATED)}.")


def make_policy(name: str, setting: PolicySetting) -> EvictionPolicy:
    """Make a policy by name.

    Raises:
        SettingError: if there is no such policy.
    """
    check_policies([name])
    return POLICIES[name](setting)  # pyright: ignore[reportArgumentType]
