"""Numbers of a running model. A miss is counted where it is paid; numbers leave as frozen snapshots."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerStats:
    """Count one MoE layer's needs."""

    hits: int
    delayed_hits: int
    misses: int


@dataclass(frozen=True, kw_only=True)
class RuntimeStats:
    """Snapshot of what a runtime has done since it was loaded or reset."""

    tokens: int
    """Tokens that went through the first MoE layer, padding included."""
    steps: int
    """Forwards of a stack."""
    events: int
    """(step, MoE layer) pairs."""
    hits: int
    """Needed experts that were resident."""
    delayed_hits: int
    """Needed experts that were in flight."""
    misses: int
    """Needed experts that were absent."""
    evictions: int
    """Experts that left the cache."""
    prefetches: int
    """Prefetches submitted."""
    dropped_prefetches: int
    """Prefetches that were dropped before they had landed, since the router chose otherwise."""
    failed_prefetches: int
    """Prefetches that could not be read."""
    on_time: int
    """Prefetches that were resident when their expert was needed."""
    wasted_bytes: int
    """Bytes prefetched and evicted unused; a prefetch dropped half-way counts in full."""
    bytes_read: int
    """Bytes read from the store."""
    stall_s: float
    """Seconds that compute waited for bytes."""
    experts_s: float
    """Seconds inside the experts, stalls included."""
    forecasts: int
    """Forecasts that came in time for the step they were made for."""
    late_forecasts: int
    """Forecasts that came too late."""
    forecast_recall: float | None
    """Share of the needed experts among the forecast's largest, at the number needed; None without forecasts."""
    predictor_ms: float | None
    """Mean milliseconds of one predictor call; None without calls."""
    mode: str
    """off, observe, enforce or auto: what is in force, see reason."""
    reason: str
    """Why the mode is what it is."""
    slots: int
    """Experts that are held at a time."""
    experts: int
    """Routed experts of the model."""
    block_bytes: int
    """Bytes of one slot."""
    reader: str
    """How the store is read: direct, preadv or seek."""
    per_layer: tuple[LayerStats, ...] = field(default=())
    """The three counts by MoE layer."""

    @property
    def on_time_share(self) -> float | None:
        """Share of the prefetches that were resident when needed; None where nothing was prefetched."""
        return self.on_time / self.prefetches if self.prefetches else None

    @property
    def hit_rate(self) -> float:
        """Hits over all needs."""
        return self.hits / max(1, self.hits + self.delayed_hits + self.misses)

    @property
    def bytes_per_token(self) -> float:
        """Bytes read from the store per token."""
        return self.bytes_read / max(1, self.tokens)

    def to_json(self) -> dict[str, Any]:
        """Give the snapshot as plain JSON values, shares included."""
        return {
            **asdict(self),
            "on_time_share": self.on_time_share,
            "hit_rate": self.hit_rate,
            "bytes_per_token": self.bytes_per_token,
        }
