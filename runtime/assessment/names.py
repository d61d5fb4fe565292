"""Policies, free signals and rates in words. Knows names and one number format."""

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


def rate_of(tokens_per_s: float) -> str:
    """Format tokens per second: three digits, and no exponent for large ones."""
    return f"{tokens_per_s:,.0f}" if tokens_per_s >= 999.5 else f"{tokens_per_s:.3g}"
