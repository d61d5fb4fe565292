"""Experts of ZAYA: stacked experts, and one choice more that skips them.

The router writes that choice as expert 0 with weight 0. It is recorded as -1; the resident model multiplies expert 0's
output with 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from .base import Routing
from .fused import FusedKind, ids_and_weights


class ZayaKind(FusedKind):
    """Stacked experts behind the experts interface, called with weight 0 where a token skips them."""

    name = "zaya"

    def matches(self, module: nn.Module) -> bool:
        """Say no: from its structure it is any fused module; `EXCEPTIONS` has its class."""
        return False

    def routing(self, module: Any, values: Sequence[Any]) -> Routing:
        """Read (hidden [N, H], ids [N, 1], weights [N, 1]); ids of weight 0 become -1."""
        ids_N1, weights_N1 = ids_and_weights(module, values)
        return Routing(torch.where(weights_N1 == 0, -1, ids_N1), weights_N1)
