"""An experts module that a forward calls several times: each call is a MoE layer of its own, with the same experts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .base import OffloadedLayer


class LoopedLayers:
    """Pass each call of a module on to the next of its layers; `reset` where a forward begins."""

    def __init__(self, layers: Sequence[OffloadedLayer]) -> None:
        self.layers = tuple(layers)
        self._turn = 0

    def reset(self, *_: Any) -> None:
        """Begin with the first layer again, also after a forward that an error ended inside of the loop."""
        self._turn = 0

    def run(self, *args: Any) -> torch.Tensor:
        """Compute the layer whose turn it is."""
        layer = self.layers[self._turn]
        self._turn = (self._turn + 1) % len(self.layers)
        return layer.run(*args)
