"""What prefetching, a better cache and both can gain over LRU on demand, from a few numbers. Knows no traces or files.

Per token: compute takes C seconds, one read b, a policy misses M experts. On demand every read is waited for: C + M b.
A prefetch hides reads behind compute, at most as long as the link would idle, which is C: with perfect foresight a
token takes max(C, M b). The limit lets Belady's misses take that path. Without sizes everything is counted in reads,
and the gains are the largest that any machine could show:

  prefetch   (C + M b) / max(C, M b)      <= 2,              reached where C = M b
  cache      (C + M b) / (C + B b)        <= M / B,          approached where C is small
  both       (C + M b) / max(C, B b)      <= 1 + M / B,      reached where C = B b       (B: Belady's misses)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np


class Misses(NamedTuple):
    """Misses per token of the same events and capacity."""

    lru: float
    free: float
    """Of the best policy that needs no training; LRU's where no other is better."""
    belady: float


class Coverage(NamedTuple):
    """The best free signal's share of the misses that it covers, by how many experts it may fetch per miss."""

    fetched_per_miss: Sequence[float]
    """Ascending."""
    covered: Sequence[float]

    def at(self, fetched_per_miss: float) -> float:
        """Give the covered share, interpolated; nothing fetched covers nothing."""
        if not len(self.covered):
            return 0.0
        return float(np.interp(fetched_per_miss, [0.0, *self.fetched_per_miss], [0.0, *self.covered]))


@dataclass(frozen=True, kw_only=True)
class TokenTimes:
    """Hold seconds per token of each way to serve the same events."""

    resident: float
    """All experts resident: compute alone."""
    lru: float
    """LRU, on demand."""
    lru_prefetched: float
    """LRU, its misses foretold."""
    belady: float
    """Belady's optimum, on demand."""
    limit: float
    """Belady's optimum, its misses foretold."""
    free: float
    """The best free policy, on demand."""
    free_signal: float
    """The best free policy, with the best free signal in the link's idle time: what there is without training."""
    free_prefetched: float
    """The best free policy, its misses foretold."""
    belady_signal: float
    """Belady's optimum with the best free signal."""

    def to_json(self) -> dict[str, float]:
        """Give tokens per second of each."""
        return {name: 1 / seconds for name, seconds in asdict(self).items()}


def on_demand_s(misses: float, compute_s: float, read_s: float) -> float:
    """Give C + M b."""
    return compute_s + misses * read_s


def prefetched_s(misses: float, compute_s: float, read_s: float) -> float:
    """Give max(C, M b)."""
    return max(compute_s, misses * read_s)


def signal_s(misses: float, compute_s: float, read_s: float, coverage: Coverage) -> float:
    """Give C + M b less the reads that the signal covers when it fills the link's idle time, C, and no more."""
    if not misses:
        return compute_s
    useful = coverage.at(compute_s / (misses * read_s)) * misses
    return max(prefetched_s(misses, compute_s, read_s), on_demand_s(misses, compute_s, read_s) - useful * read_s)


def token_times(misses: Misses, compute_s: float, read_s: float, coverage: Coverage) -> TokenTimes:
    """Give the seconds per token of each way to serve the events."""
    return TokenTimes(
        resident=compute_s,
        lru=on_demand_s(misses.lru, compute_s, read_s),
        lru_prefetched=prefetched_s(misses.lru, compute_s, read_s),
        belady=on_demand_s(misses.belady, compute_s, read_s),
        limit=prefetched_s(misses.belady, compute_s, read_s),
        free=on_demand_s(misses.free, compute_s, read_s),
        free_signal=signal_s(misses.free, compute_s, read_s, coverage),
        free_prefetched=prefetched_s(misses.free, compute_s, read_s),
        belady_signal=signal_s(misses.belady, compute_s, read_s, coverage),
    )


@dataclass(frozen=True, kw_only=True)
class Gains:
    """Hold how much faster than LRU on demand each way can be at most; 1 = not at all."""

    prefetch: float
    cache: float
    both: float

    def to_json(self) -> dict[str, Any]:
        """Give them as plain values."""
        return asdict(self)


def gains_of(times: TokenTimes) -> Gains:
    """Give the gains on one machine."""
    return Gains(
        prefetch=times.lru / times.lru_prefetched, cache=times.lru / times.belady, both=times.lru / times.limit
    )


def largest_gains(misses: Misses) -> Gains:
    """Give the gains that no machine exceeds."""
    if not misses.belady:
        return Gains(prefetch=1.0, cache=1.0, both=1.0)
    rate = misses.lru / misses.belady
    return Gains(prefetch=2.0, cache=rate, both=1 + rate)
