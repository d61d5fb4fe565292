"""Eviction policies: who leaves the expert cache. `lru` ranks by the past, `belady` is told the future."""

from __future__ import annotations

from .base import EvictionPolicy
from .belady import Belady
from .lru import Lru

__all__ = ["Belady", "EvictionPolicy", "Lru"]
