"""What prefetching, a better cache and both can gain over LRU on demand, from a few numbers. Knows no traces or files.

Per token: compute takes C seconds, one read b, a policy misses M experts. With perfect foresight a token takes
max(C, M b): reading goes on beside compute, and neither can be shorter. The limit is that of Belady's misses. On demand
a token takes at most C + M b, all reads waited for; where the machine is known, `runtime/time_model.py` says how much
of them overlaps with the products of resident experts. A signal's prefetches can fill the time that the link would
idle on demand, and hide as many reads as they name misses. Where the machine is unknown nothing is taken to overlap on
demand, and the gains are the largest that any machine could show:

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
    """Misses (or seconds on demand) per token of three policies, on the same events at the same capacity."""

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


def prefetched_s(misses: float, compute_s: float, read_s: float) -> float:
    """Give max(C, M b)."""
    return max(compute_s, misses * read_s)


def signal_s(on_demand_s: float, misses: float, compute_s: float, read_s: float, coverage: Coverage) -> float:
    """Give the time on demand less the reads that a signal hides when its prefetches fill the link's idle time."""
    if not misses or not read_s:
        return on_demand_s
    idle_s = max(0.0, on_demand_s - misses * read_s)
    hidden_s = coverage.at(idle_s / (misses * read_s)) * misses * read_s
    return max(prefetched_s(misses, compute_s, read_s), on_demand_s - hidden_s)


def token_times(
    misses: Misses, compute_s: float, read_s: float, coverage: Coverage, on_demand: Misses | None = None
) -> TokenTimes:
    """Give the seconds per token of each way to serve the events.

    Args:
        on_demand: seconds per token of each policy on demand; by default C + M b, without overlap.
    """
    waited = on_demand or Misses(*(compute_s + count * read_s for count in misses))
    return TokenTimes(
        resident=compute_s,
        lru=waited.lru,
        lru_prefetched=prefetched_s(misses.lru, compute_s, read_s),
        belady=waited.belady,
        limit=prefetched_s(misses.belady, compute_s, read_s),
        free=waited.free,
        free_signal=signal_s(waited.free, misses.free, compute_s, read_s, coverage),
        free_prefetched=prefetched_s(misses.free, compute_s, read_s),
        belady_signal=signal_s(waited.belady, misses.belady, compute_s, read_s, coverage),
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
    """Give the gains that no machine exceeds that overlaps nothing on demand."""
    if not misses.belady:
        return Gains(prefetch=1.0, cache=1.0, both=1.0)
    rate = misses.lru / misses.belady
    return Gains(prefetch=2.0, cache=rate, both=1 + rate)
