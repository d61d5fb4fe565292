"""Eviction policies: who leaves the expert cache.

`Lru` ranks by the past, `Predicted` by how often and how likely, `Belady` is told the future.
"""

from __future__ import annotations

from .base import EvictionPolicy
from .belady import Belady
from .lru import Lru
from .predicted import Predicted

__all__ = ["Belady", "EvictionPolicy", "Lru", "Predicted"]
