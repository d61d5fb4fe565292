"""A layer of ZAYA experts: the arithmetic of fused ones; what a skipping token is multiplied with is 0."""

from __future__ import annotations

from .fused import FusedLayer


class ZayaLayer(FusedLayer):
    """Compute a layer whose tokens may skip its experts."""

    kind = "zaya"
