"""Layer classes of offloaded models: `LAYERS` by the kind of their experts module. A kind is one file here.

Importing it enters `foregate` into transformers' experts interface.
"""

from __future__ import annotations

from ...collect.errors import ModelError, SettingError
from ...collect.kinds import register_kind
from ...collect.kinds.base import ExpertsKind
from .base import OffloadedLayer, Place, StandIn
from .dbrx import DbrxLayer
from .fused import IMPLEMENTATION, FusedLayer
from .jetmoe import JetMoeLayer
from .llama4 import Llama4Layer
from .longcat import LongcatLayer
from .looped import LoopedLayers
from .nllb import NllbLayer
from .step3p7 import Step3p7Layer
from .switch import SwitchLayer
from .zaya import ZayaLayer

__all__ = [
    "IMPLEMENTATION",
    "LAYERS",
    "LoopedLayers",
    "OffloadedLayer",
    "Place",
    "StandIn",
    "layer_class",
    "register_family",
    "register_layer",
]

LAYERS: dict[str, type[OffloadedLayer]] = {
    layer.kind: layer
    for layer in (
        FusedLayer,
        SwitchLayer,
        NllbLayer,
        Llama4Layer,
        DbrxLayer,
        JetMoeLayer,
        LongcatLayer,
        Step3p7Layer,
        ZayaLayer,
    )
}


def layer_class(kind: str) -> type[OffloadedLayer]:
    """Give the layer class of a kind.

    Raises:
        ModelError: if the kind can be recorded only.
    """
    if kind not in LAYERS:
        raise ModelError(
            f"Experts of kind {kind!r} can be recorded but not offloaded; legal kinds are {', '.join(LAYERS)}, others "
            "need a layer class that is registered."
        )
    return LAYERS[kind]


def register_layer(layer: type[OffloadedLayer]) -> None:
    """Add the layer class of a kind that was registered.

    Raises:
        SettingError: if the kind has another one.
    """
    if LAYERS.get(layer.kind, layer) is not layer:
        raise SettingError(f"kind must not be one of {', '.join(LAYERS)}, got {layer.kind!r}.")
    LAYERS[layer.kind] = layer


def register_family(kind: ExpertsKind, layer: type[OffloadedLayer] | None = None) -> None:
    """Add a family whose experts have a form of their own: how they are recorded, and how they compute from slots.

    Args:
        kind: finds, reads and cuts the experts modules.
        layer: its counterpart, of the same kind; without it the family can be recorded only.

    Raises:
        SettingError: if the name is taken, or kind and layer have different ones.
    """
    if layer is not None and layer.kind != kind.name:
        raise SettingError(f"layer must be of the kind {kind.name!r}, got one of {layer.kind!r}.")
    register_kind(kind)
    if layer is not None:
        register_layer(layer)
