"""Layer classes of offloaded models: `LAYERS` by the kind of their experts module. A kind is one file here.

Importing it enters `foregate` into transformers' experts interface.
"""

from __future__ import annotations

from ...collect.errors import ModelError, SettingError
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
