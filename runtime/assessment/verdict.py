"""The plain sentence: what can be gained at most, and whether training is worth it. A pure function of numbers.

Training can add what lies between the best free way (the best policy that needs no training, with the best free
signal in the link's idle time) and perfect foresight, and of that only a share:

  prefetch  .22 of the time between the free signal and all misses foretold
  eviction  .11 of the time between the free policy and Belady

Worth it is what gains `WORTH_GAIN` by then, where routing is predictable at all.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from .gains import Coverage, Gains, Misses, TokenTimes, gains_of, largest_gains, token_times
from .names import name_of, rate_of

# Passes of one arm of `foregate demo` differ by as much (docs/performance.md: 12.7 to 14.0 tokens/s around 13.1).
WORTH_GAIN = 1.05
# foregate-mini's predictor names .850 of held-out experts where the token table names .808: .22 of what was left.
PREFETCH_SHARE = 0.22
# moe-cache-eval (arXiv 2608.07911): a causal predictor of the next use recovers 11 % of the misses from LRU to Belady.
EVICTION_SHARE = 0.11
# Recall that the best signal must have over knowing popularity alone; intervals over sequences are about this wide.
PREDICTABLE = 0.05
UNSAID = "What prefetching or a cache can gain, and whether training is worth it, cannot be said:"
AS_GOOD = "a trained predictor as good as those measured so far"
INCOMPLETE = 0.25  # share of absent choices from where on a trace says little; expert capacity drops a few percent
NOTHING = Coverage((), ())
SATURATED = 2.0  # limit / compute from where on, even with perfect foresight, most of the time is reading
RATIOS = np.geomspace(1e-3, 1e3, 601)  # time to read LRU's misses / compute: machines to look through

Kind = Literal["incomplete", "fits", "saturated", "free_suffices", "unpredictable", "train", "depends"]


@dataclass(frozen=True, kw_only=True)
class Findings:
    """Hold the numbers that the verdict rests on."""

    capacity: int
    """Experts that fit in slots."""
    num_experts: int
    """Experts of the model."""
    misses: Misses
    """Per token, at that capacity."""
    fits: bool
    """Whether all experts that the events use fit in the slots at once."""
    free_policy: str = "lru"
    """The best policy that needs no training."""
    signal: str | None = None
    """The free signal that covers most misses; None where none could be measured."""
    coverage: Coverage = NOTHING
    """What it covers."""
    recall: float | None = None
    """Largest demand recall of a free signal; None as above."""
    known: float | None = None
    """Demand recall of popularity alone: what knowing the load and no token names."""
    times: TokenTimes | None = None
    """On the machine that was asked about; None without sizes."""
    machine: str | None = None
    """Its name."""
    absent: float = 0.0
    """Share of the choices that the trace does not hold (-1)."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Say what can be gained and whether training is worth it."""

    kind: Kind
    """Which case it is."""
    training: bool | None
    """Whether training a predictor is worth it; None where that depends on the machine and no sizes were given."""
    gains: Gains | None
    """At most, over LRU on demand = 1; None where nothing was replayed."""
    room: float | None
    """Time of the best free way over the limit; None without sizes."""
    attainable: float | None
    """What a trained predictor can be expected to gain over the best free way; None without sizes."""
    worth_between: list[float] | None
    """Smallest and largest (time to read LRU's misses / compute) at which training would be worth it; None: at none."""
    sentence: str
    """All of it in words."""
    because: str
    """The reason alone."""

    def to_json(self) -> dict[str, Any]:
        """Give the verdict as plain values."""
        return asdict(self)


def attainable(times: TokenTimes) -> float:
    """Give what a trained predictor can be expected to gain over the best free way, never more than the limit."""
    by_prefetch = PREFETCH_SHARE * (times.free_signal - times.free_prefetched)
    by_eviction = EVICTION_SHARE * (times.free_signal - times.belady_signal)
    return times.free_signal / max(times.limit, times.free_signal - max(0.0, by_prefetch) - max(0.0, by_eviction))


def worth_between(misses: Misses, coverage: Coverage) -> list[float] | None:
    """Give the smallest and largest ratio of reading LRU's misses to compute at which training would be worth it."""
    if not misses.lru:
        return None
    worth = [
        float(r) for r in RATIOS if attainable(token_times(misses, 1.0, float(r) / misses.lru, coverage)) >= WORTH_GAIN
    ]
    return [worth[0], worth[-1]] if worth else None


def judge(found: Findings) -> Verdict:
    """Give the verdict."""
    times = found.times
    gains = largest_gains(found.misses) if times is None else gains_of(times)
    if found.fits:
        gains = Gains(prefetch=1.0, cache=1.0, both=1.0)
    room = None if times is None else times.free_signal / times.limit
    attained = None if times is None else attainable(times)
    between = None if found.fits else worth_between(found.misses, found.coverage)
    kind, training, because = _case(found, room, attained, between)
    return Verdict(
        kind=kind,
        training=training,
        gains=gains,
        room=room,
        attainable=attained,
        worth_between=between,
        sentence=_sentence(found, gains, kind, training, because),
        because=because,
    )


def undecided(reason: str, *, in_steps: bool) -> Verdict:
    """Give the verdict on a trace whose notes forbid to replay it.

    Args:
        reason: a clause.
        in_steps: whether it may be replayed with each sequence as one step.
    """
    mend = "record all layers of every request's tokens, as foregate collect does"
    because = f"{reason}; {mend}{', or assess it --as prefill, each sequence one step' if in_steps else ''}."
    return Verdict(
        kind="incomplete",
        training=None,
        gains=None,
        room=None,
        attainable=None,
        worth_between=None,
        sentence=f"{UNSAID} {because}",
        because=because,
    )


def _case(
    found: Findings, room: float | None, attained: float | None, between: list[float] | None
) -> tuple[Kind, bool | None, str]:
    if found.absent >= INCOMPLETE:
        return (
            "incomplete",
            None,
            f"{found.absent:.0%} of the choices are absent from this trace, so its misses are not the model's; record "
            "or import all MoE layers of every token.",
        )
    if found.fits:
        every = "everything fits" if found.capacity >= found.num_experts else "all experts that the trace uses fit"
        return "fits", False, f"{every}: each expert is read once, and there is nothing left to prefetch or to evict."
    if found.recall is not None and found.known is not None and found.recall - found.known < PREDICTABLE:
        return (
            "unpredictable",
            False,
            f"nothing that is known beforehand foretells the routing: the best free signal names {found.recall:.0%} of "
            f"a token's experts, popularity alone {found.known:.0%}.",
        )
    if found.times is None or room is None or attained is None:
        if between is None:
            return "free_suffices", False, f"on no machine would it gain {WORTH_GAIN - 1:.0%} over {_free(found)}."
        return (
            "depends",
            None,
            f"it would be where reading LRU's misses takes {ratio_words(between)} the compute of a token; name the "
            "machine with --hardware, --expert-mib and --dense-ms.",
        )
    if attained >= WORTH_GAIN:
        return "train", True, _why_train(found, found.times, room, attained)
    busy = found.times.limit / found.times.resident
    if busy >= SATURATED:
        return (
            "saturated",
            False,
            f"the link is saturated: even with perfect foresight reading takes {busy:.1f} x the compute, and {AS_GOOD} "
            f"would gain {_percent(attained)}; only more slots, smaller experts or a faster link help much.",
        )
    return (
        "free_suffices",
        False,
        f"the limit is {_percent(room)} faster than {_free(found)}, and {AS_GOOD} would gain {_percent(attained)}.",
    )


def _why_train(found: Findings, times: TokenTimes, room: float, attained: float) -> str:
    by_prefetch = PREFETCH_SHARE * (times.free_signal - times.free_prefetched)
    by_eviction = EVICTION_SHARE * (times.free_signal - times.belady_signal)
    head = "foretelling misses (routing head)" if by_prefetch >= by_eviction else "choosing victims (reuse head)"
    busy = times.limit / times.resident
    more = f"; the limit itself is {busy:.1f} x the compute, for which only more slots or smaller experts would help"
    return (
        f"the limit is {room:.2f} x as fast as {_free(found)}, and {AS_GOOD} would gain {_percent(attained)}, most of "
        f"it by {head}{more if busy >= SATURATED else ''}."
    )


def _sentence(found: Findings, gains: Gains, kind: Kind, training: bool | None, because: str) -> str:
    if kind == "incomplete":
        return f"{UNSAID} {because}"  # bounds of other misses than the model's would be taken for the model's
    return f"{_at_most(found, gains)} {_worth(training)} {because}"


def _at_most(found: Findings, gains: Gains) -> str:
    share = found.capacity / found.num_experts
    slots = f"With {found.capacity} of {found.num_experts} experts ({share:.0%}) in slots"
    bounds = (
        f"prefetching can gain at most {gains.prefetch:.2f} x, a better cache at most {gains.cache:.2f} x, "
        f"both at most {gains.both:.2f} x"
    )
    if found.times is None:
        return f"{slots} and LRU on demand = 1, {bounds}, whatever the machine."
    machine = found.machine or "this machine"
    lru, limit = (f"{rate_of(1 / seconds)} tokens/s" for seconds in (found.times.lru, found.times.limit))
    return f"{slots} on {machine}, LRU on demand makes {lru}; {bounds} ({limit})."


def _worth(training: bool | None) -> str:
    if training is None:
        return "Whether training is worth it depends on the machine:"
    return "Training is worth it here:" if training else "Training is not worth it here:"


def _free(found: Findings) -> str:
    signal = "" if found.signal is None else f" with the free signal {name_of(found.signal)}"
    return f"{name_of(found.free_policy)}{signal}"


def _percent(ratio: float) -> str:
    return f"{ratio - 1:.1%}" if ratio < 1.1 else f"{ratio - 1:.0%}"


def ratio_words(between: list[float]) -> str:
    """Give `worth_between` in words."""
    low, high = between
    if high >= RATIOS[-1]:
        return f"at least {low:.2g} x"
    return f"{low:.2g} to {high:.2g} x" if low > RATIOS[0] else f"at most {high:.2g} x"
