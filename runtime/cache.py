"""Expert cache: which experts are resident and who leaves. Knows flat indices; no slots, bytes or threads.

Event-atomic: `event` takes the distinct experts that one (step, MoE layer) needs at once. Hits are what is resident
when it starts; misses enter; then the cache is cut back to its capacity. In an event of one token its own experts
never leave, if they fit at all; in an event of several they may, since an event can need more than the capacity.

Prefetched experts are on probation until an event uses them: at most `probation` of them at a time, first those in
flight, then those that landed. One whose event has passed without it was a wrong guess and leaves before anything that
was demanded.

Example: capacity 3, resident {1, 2, 3}, last used in that order, one token needs [3, 9]: hits [3], misses [9],
leaving [1]; afterwards {2, 3, 9}.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..collect.errors import SettingError
from .policies.base import EvictionPolicy


class EventPlan(NamedTuple):
    """What one event finds and what it changes."""

    hits: list[int]
    """Needed and resident."""
    delayed: list[int]
    """Needed and in flight as a prefetch; resident from now on."""
    misses: list[int]
    """Needed and absent; resident from now on unless they also leave."""
    leaving: list[int]
    """No longer resident after this event; those that the event needs are computed first."""


class ExpertCache:
    """Keep the directory of resident experts.

    Args:
        capacity: experts that fit.
        policy: who leaves first.
        probation: prefetched experts that may be resident or in flight before they are used.

    Raises:
        SettingError: if the capacity is not positive or probation leaves nothing for what is demanded.
    """

    def __init__(self, capacity: int, policy: EvictionPolicy, *, probation: int = 0) -> None:
        if capacity < 1:
            raise SettingError(f"capacity must be at least 1 expert, got {capacity}.")
        if not 0 <= probation < capacity:
            raise SettingError(f"probation must lie in 0..{capacity - 1}, got {probation}.")
        self.capacity, self.policy, self.probation = capacity, policy, probation
        self.resident: set[int] = set()
        self.in_flight: dict[int, int] = {}  # prefetched expert -> the event it was meant for
        self.unproven: dict[int, int] = {}  # landed and not yet used, oldest first -> the event it was meant for
        self.clock = 0  # events so far
        self.wasted = 0  # prefetched experts that left unused

    def event(self, needed: Sequence[int], *, one_token: bool) -> EventPlan:
        """Serve one event of distinct experts in ascending order and say what it changes."""
        resident = self.resident
        hits = [expert for expert in needed if expert in resident]
        delayed = [expert for expert in needed if expert in self.in_flight] if self.in_flight else []
        misses = [expert for expert in needed if expert not in resident and expert not in self.in_flight]
        self.clock += 1
        self.policy.use(needed, self.clock)
        for expert in delayed:
            del self.in_flight[expert]
        if self.unproven:
            for expert in hits:
                self.unproven.pop(expert, None)
        resident.update(delayed)
        resident.update(misses)
        fits = one_token and len(needed) + len(self.in_flight) <= self.capacity
        protected = frozenset(needed) if fits else frozenset()
        leaving = self._drop(self.policy.overdue(protected))
        excess = len(resident) + len(self.in_flight) - self.capacity
        if excess > 0:
            leaving += self._leave(excess, protected)
        return EventPlan(hits, delayed, misses, leaving)

    def admit(self, expert: int, event: int, pinned: frozenset[int]) -> list[int] | None:
        """Make room for a prefetch meant for `event`; give who leaves, or None where it may not enter."""
        if expert in self.resident or expert in self.in_flight or self.probation == 0:
            return None
        leaving: list[int] = []
        if len(self.in_flight) + len(self.unproven) >= self.probation:
            expired = self._expired(1)
            if not expired:
                return None
            leaving = self._drop(expired)
        elif len(self.resident) + len(self.in_flight) >= self.capacity:
            leaving = self._leave(1, pinned)
            if not leaving:
                return None
        self.in_flight[expert] = event
        return leaving

    def land(self, expert: int) -> None:
        """Note that a prefetch arrived: resident, on probation."""
        self.unproven[expert] = self.in_flight.pop(expert)
        self.resident.add(expert)

    def abandon(self, expert: int) -> None:
        """Note that a prefetch was cancelled or failed."""
        del self.in_flight[expert]

    def forget(self, expert: int) -> None:
        """Drop an expert whose bytes are not there after all."""
        self._drop([expert])

    def check(self) -> None:
        """Verify every invariant.

        Raises:
            AssertionError: if the directory is inconsistent.
        """
        assert len(self.resident) + len(self.in_flight) <= self.capacity, (len(self.resident), len(self.in_flight))
        assert not self.resident & self.in_flight.keys()
        assert self.unproven.keys() <= self.resident
        assert len(self.in_flight) + len(self.unproven) <= self.probation
        assert self.policy.tracked() == self.resident - self.unproven.keys()

    def _leave(self, count: int, protected: frozenset[int]) -> list[int]:
        """Choose and drop `count` experts: wrong guesses first, then the policy's victims, then open guesses."""
        chosen = [expert for expert in self._expired(count) if expert not in protected]
        if len(chosen) < count:
            chosen += self.policy.victims(count - len(chosen), protected)
        if len(chosen) < count:
            open_guesses = [e for e in self.unproven if e not in protected and e not in chosen]
            chosen += open_guesses[: count - len(chosen)]
        return self._drop(chosen)

    def _expired(self, count: int) -> list[int]:
        if not self.unproven:
            return []
        return [expert for expert, event in self.unproven.items() if event <= self.clock][:count]

    def _drop(self, experts: list[int]) -> list[int]:
        for expert in experts:
            self.resident.discard(expert)
            if self.unproven.pop(expert, None) is not None:
                self.wasted += 1
            self.policy.remove(expert)
        return experts
