"""Eviction policies: who leaves the expert cache; `registry.py` has them by name, docs/simulation.md their formulas.

By the past: `Lru`, `Lfu`, `Lfru`, `S3Fifo`, `LayerLru`; by a load: `Static`; by the running request: `Activation`; by
forecasts: `Predicted`; by chance: `Random`; told the future: `Belady`.
"""

from __future__ import annotations

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

__all__ = [
    "Activation",
    "Belady",
    "EvictionPolicy",
    "LayerLru",
    "Lfru",
    "Lfu",
    "Lru",
    "Predicted",
    "Random",
    "S3Fifo",
    "Static",
]
