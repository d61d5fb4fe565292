"""One event while it is served: resident experts first, then the others in the order in which they arrive.

Knows slots and transfers; knows nothing of forecasts or threads. Experts that only pass through are read first, so that
those that stay find the last slots; each is read at most once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Sequence

from .cache import EventPlan
from .clock import Clock
from .placement import Placement
from .prefetch import Windows
from .transfer import Transfer


class Serving:
    """Serve one event: `start`, iterate, `end`.

    Args:
        needed: the event's experts.
        plan: what the directory said of them.
        on_idle: called once, when every read of the event has ended.
    """

    def __init__(
        self,
        placement: Placement,
        needed: Sequence[int],
        plan: EventPlan,
        clock: Clock,
        windows: Windows,
        on_idle: Callable[[], None],
    ) -> None:
        self.placement, self.clock, self.windows, self.on_idle = placement, clock, windows, on_idle
        self.passing = set(plan.leaving).intersection(needed)  # computed once and gone
        self.hits = self._passing_first(plan.hits)
        self.delayed = deque(plan.delayed)
        self.queue = deque(self._passing_first(plan.misses))
        self.pending: dict[int, Transfer] = {}
        self.experts = self._serve()

    def start(self) -> None:
        """Begin to read what is absent."""
        while self.delayed:
            self.pending[self.delayed[0]] = self.placement.promote(self.delayed[0])
            self.delayed.popleft()
        self._load()
        self._note_idle()

    def end(self) -> None:
        """End what is left over; after a full pass nothing is, after an error or an early leave the loads are."""
        self.experts.close()
        placement = self.placement
        for transfer in self.pending.values():
            placement.transfers.cancel(transfer)
        for expert in self.delayed:
            placement.transfers.cancel(placement.prefetches.pop(expert))
        for expert in [*self.pending, *self.delayed, *self.queue]:
            placement.forget(expert)
        for expert in self.passing:
            if expert in placement.slot_of:
                placement.release(expert)

    def _serve(self) -> Generator[tuple[int, int], None, None]:
        placement = self.placement
        for expert in self.hits:
            yield expert, placement.slot_of[expert]
            self._computed(expert)
        while self.pending:
            expert, slot = self._arrival()
            yield expert, slot
            self._computed(expert)
        assert not self.queue, self.queue

    def _arrival(self) -> tuple[int, int]:
        start = self.clock.now()
        transfer = self.placement.transfers.wait_any(list(self.pending.values()))
        self.placement.counters.stall_s += self.clock.now() - start
        if transfer.started_s is not None and transfer.finished_s is not None:
            self.windows.note_read(transfer.finished_s - transfer.started_s)
        del self.pending[transfer.expert]
        self._load()
        self._note_idle()
        return transfer.expert, transfer.slot

    def _load(self) -> None:
        while self.queue:
            transfer = self.placement.load(self.queue[0])
            if transfer is None:
                return
            self.pending[self.queue.popleft()] = transfer

    def _note_idle(self) -> None:
        if not self.pending and not self.queue:
            self.on_idle()

    def _computed(self, expert: int) -> None:
        if expert in self.passing:
            self.passing.discard(expert)
            self.placement.release(expert)
            self._load()

    def _passing_first(self, experts: list[int]) -> list[int]:
        return sorted(experts, key=lambda expert: expert not in self.passing)
