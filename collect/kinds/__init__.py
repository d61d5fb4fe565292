"""Kinds of experts modules: `KINDS` by name, and the search for a module's kind. A kind is one file here.

Finding is structural; `EXCEPTIONS` is for classes whose structure misleads.
"""

from __future__ import annotations

from torch import nn

from ..errors import ModelError, SettingError
from .base import ExpertsKind
from .dbrx import DbrxKind
from .fused import FusedKind
from .jetmoe import JetMoeKind
from .llama4 import Llama4Kind
from .longcat import LongcatKind
from .nllb import NllbKind
from .step3p7 import Step3p7Kind
from .switch import SwitchKind
from .zaya import ZayaKind

__all__ = ["EXCEPTIONS", "KINDS", "kind_named", "kind_of", "register_kind"]

KINDS: dict[str, ExpertsKind] = {
    kind.name: kind
    for kind in (
        FusedKind(),
        SwitchKind(),
        NllbKind(),
        Llama4Kind(),
        DbrxKind(),
        JetMoeKind(),
        LongcatKind(),
        Step3p7Kind(),
        ZayaKind(),
    )
}

EXCEPTIONS: dict[str, str | None] = {"ZayaExperts": "zaya"}
"""Class name -> kind, or None for a class that only looks like one."""


def kind_of(module: nn.Module) -> str | None:
    """Name the kind of an experts module, also of one whose experts went into a store; None for any other module."""
    left = getattr(module, "foregate_kind", None)
    if left is not None:
        return left
    name = type(module).__name__
    if name in EXCEPTIONS:
        return EXCEPTIONS[name]
    return next((kind.name for kind in KINDS.values() if kind.matches(module)), None)


def kind_named(name: str) -> ExpertsKind:
    """Give a kind by name.

    Raises:
        ModelError: if there is none; one that a program registers has to be registered before a model is looked at.
    """
    if name not in KINDS:
        raise ModelError(f"kind must be one of {', '.join(KINDS)}, got {name!r}; register it first.")
    return KINDS[name]


def register_kind(kind: ExpertsKind) -> None:
    """Add a kind; kinds are asked in the order in which they were added, foregate's own first.

    Raises:
        SettingError: if the name is taken by another kind.
    """
    if kind.name in KINDS and type(KINDS[kind.name]) is not type(kind):
        raise SettingError(f"name must not be one of {', '.join(KINDS)}, got {kind.name!r}.")
    KINDS[kind.name] = kind
