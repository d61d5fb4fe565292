"""Families of trained predictors by name. A new family is one file with its settings and network, and one line here."""

from __future__ import annotations

from typing import Any

from ..collect.errors import SettingError
from .copy_attention import CopyAttentionSettings
from .copy_layers import CopyLayersSettings
from .eam import EamSettings
from .lstm_sparsemax import LstmSparsemaxSettings
from .mlp import MlpSettings
from .network import NetworkSettings
from .routing_path import RoutingPathSettings
from .shadow import ShadowSettings
from .sru_attention import SruAttentionSettings

FAMILIES: dict[str, type[NetworkSettings]] = {
    kind.family: kind
    for kind in (
        CopyAttentionSettings,
        CopyLayersSettings,
        EamSettings,
        LstmSparsemaxSettings,
        MlpSettings,
        RoutingPathSettings,
        ShadowSettings,
        SruAttentionSettings,
    )
}


def default_settings(stack: str, top_k: int) -> NetworkSettings:
    """Give the family that a stack's predictor is trained by where none is named; `top_k` is the largest of its layers.

    A causal stack has the copying one; the others, whose tokens are all known at once, have the SRU.
    """
    if stack == "causal":
        return CopyAttentionSettings()
    return SruAttentionSettings(link="softmax" if top_k == 1 else "sigmoid")


def settings_from_json(family: str, values: dict[str, Any]) -> NetworkSettings:
    """Build a family's settings from what `NetworkSettings.to_json` gave.

    Raises:
        SettingError: if there is no such family, or a setting that it does not have.
    """
    if family not in FAMILIES:
        raise SettingError(f"family must be one of {', '.join(sorted(FAMILIES))}, got {family!r}.")
    plain: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    try:
        return FAMILIES[family](**plain)
    except TypeError as error:
        raise SettingError(f"The settings of {family} do not fit this version of foregate: {error}.") from error
