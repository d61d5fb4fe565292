"""Placement: which slot holds which expert, and the reads under way. Keeps directory, slots and transfers in agreement.

Every expert of the directory has a slot, resident or in flight. Where not all experts have one, there is one slot more:
an event can need experts that the directory does not keep, and those pass through it. So the directory holds after
each event what a replay of the same events holds. Knows no tokens, forecasts or time; the engine calls it under its
lock.
"""

from __future__ import annotations

from collections.abc import Sequence

from .cache import EventPlan, ExpertCache
from .counters import Counters
from .transfer import Transfer, TransferEngine


def slots_for(capacity: int, num_experts: int) -> int:
    """Give the slots that a directory of `capacity` experts needs."""
    return capacity if capacity >= num_experts else capacity + 1


class Placement:
    """Hand out slots.

    Args:
        cache: directory of resident experts.
        transfers: fills slots.
        num_experts: experts of the whole model.
    """

    def __init__(self, cache: ExpertCache, transfers: TransferEngine, num_experts: int, counters: Counters) -> None:
        self.cache, self.transfers, self.counters = cache, transfers, counters
        self.num_slots = slots_for(cache.capacity, num_experts)
        self.slot_of: dict[int, int] = {}
        self.prefetches: dict[int, Transfer] = {}  # under way, by expert
        self._free = list(range(self.num_slots))

    def begin(self, needed: Sequence[int], one_token: bool) -> EventPlan:
        """Let the directory serve an event and free the slots of what leaves; what is needed keeps its slot for now."""
        plan = self.cache.event(needed, one_token=one_token)
        for expert in set(plan.leaving).difference(needed):
            self.release(expert)
        return plan

    def collect(self) -> None:
        """Take in the prefetches that ended."""
        for expert, transfer in list(self.prefetches.items()):
            if not transfer.done():
                continue
            del self.prefetches[expert]
            if transfer.landed:
                self.cache.land(expert)
            else:
                self.counters.failed_prefetches += 1
                self.cache.abandon(expert)
                self.release(expert)

    def load(self, expert: int) -> Transfer | None:
        """Read an expert that is needed now; None where no slot is free."""
        if not self._free:
            return None
        transfer = self.transfers.submit(expert, self._free[-1], demand=True)
        self.slot_of[expert] = self._free.pop()
        return transfer

    def promote(self, expert: int) -> Transfer:
        """Turn a prefetch into what is needed now; one that has failed is read again."""
        transfer = self.prefetches[expert]
        if transfer.done() and not transfer.landed:
            self.counters.failed_prefetches += 1
            transfer = self.transfers.submit(expert, transfer.slot, demand=True)
        else:
            self.transfers.promote(transfer)
        del self.prefetches[expert]
        return transfer

    def prefetch(self, expert: int, event: int, pinned: frozenset[int]) -> bool:
        """Read an expert ahead for an event; say whether the directory had room for it."""
        leaving = self.cache.admit(expert, event, pinned)
        if leaving is None:
            return False
        for gone in leaving:
            self.release(gone)
        self.counters.evictions += len(leaving)
        self.counters.prefetches += 1
        slot = self._free.pop()
        self.slot_of[expert] = slot
        self.prefetches[expert] = self.transfers.submit(expert, slot, demand=False)
        return True

    def drop(self, expert: int) -> None:
        """Drop a prefetch; a read into the same slot starts only after this one has ended."""
        transfer = self.prefetches.pop(expert)
        self.counters.dropped_prefetches += 1
        self.counters.wasted += transfer.started_s is not None
        self.transfers.cancel(transfer)
        self.cache.abandon(expert)
        self.release(expert)

    def forget(self, expert: int) -> None:
        """Take an expert whose bytes are not there out of the directory."""
        self.cache.forget(expert)
        if expert in self.slot_of:
            self.release(expert)

    def release(self, expert: int) -> None:
        """Free the slot of an expert that is in the directory no more."""
        self._free.append(self.slot_of.pop(expert))

    def resident(self) -> dict[int, int]:
        """Give the slot of every resident expert."""
        return {expert: self.slot_of[expert] for expert in sorted(self.cache.resident)}

    def check(self) -> None:
        """Verify, between two events, that slots and reads agree with the directory.

        Raises:
            AssertionError: if they do not.
        """
        self.cache.check()
        assert self.prefetches.keys() == self.cache.in_flight.keys(), (self.prefetches, self.cache.in_flight)
        assert self.slot_of.keys() == self.cache.resident | self.cache.in_flight.keys(), self.slot_of
        assert sorted([*self.slot_of.values(), *self._free]) == list(range(self.num_slots)), self._free
        for expert, transfer in self.prefetches.items():
            assert (transfer.expert, transfer.slot) == (expert, self.slot_of[expert]), transfer
