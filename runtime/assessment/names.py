"""Policies and free signals in words. Knows names only."""

from __future__ import annotations

NAMES = {
    "lru": "LRU",
    "lfu": "LFU",
    "lfru": "LFRU",
    "s3fifo": "S3-FIFO",
    "layer_lru": "LRU per layer",
    "static": "static hot set",
    "activation": "activation-aware",
    "random": "random",
    "belady": "Belady (optimum)",
    "predicted": "predicted demand",
}


def name_of(name: str) -> str:
    """Give the words for a policy or signal."""
    return NAMES.get(name, name.replace("_", " "))
