"""Transfer engines: one contract over all of them, and the order of pieces under a reader that waits to be told."""

from __future__ import annotations

import mmap
import os
import queue
import threading

import pytest
from foregate.collect.errors import ClosedError, SettingError, TransferError
from foregate.collect.topology import MoeTopology
from foregate.runtime.clock import ManualClock
from foregate.runtime.readers import FailingReader, open_reader
from foregate.runtime.store import Segment
from foregate.runtime.transfer import InlineTransfers, ThreadedTransfers, TransferEngine
from foregate.runtime.transfer_queue import TransferQueue

CHUNK = 4096
BLOCK = 4 * CHUNK
EXPERTS, SLOTS = 12, 6
PATIENCE = 20.0  # seconds until a test gives up; nothing waits this long when all is well


class Blocks:
    """A store of random blocks, without a model."""

    block_bytes = BLOCK
    topology = MoeTopology.uniform(2, EXPERTS // 2, 2)

    def __init__(self, path):
        self.files = [path]
        self.content = os.urandom(EXPERTS * BLOCK)
        path.write_bytes(self.content)

    def segments(self, flat):
        return (Segment(0, flat * BLOCK, BLOCK, 0),)

    def block(self, flat):
        return self.content[flat * BLOCK : (flat + 1) * BLOCK]

    def __getitem__(self, expert):
        return self.block(self.topology.flat(*expert))


class Arena:
    def __init__(self):
        self.memory = mmap.mmap(-1, SLOTS * BLOCK)
        self.view = memoryview(self.memory)

    def buffer(self, slot):
        return self.view[slot * BLOCK : (slot + 1) * BLOCK]


class Gate:
    """A reader whose reads start when they like and end when the test lets them."""

    kind, reason = "gate", "test"

    def __init__(self, reader):
        self.reader = reader
        self.started = queue.Queue()
        self.gates = {}
        self.held = []
        self.open = False

    def read_into(self, file, offset, target):
        key = (offset // BLOCK, offset % BLOCK // CHUNK, len(target) // CHUNK)
        gate = self.gates.setdefault(key, threading.Event())
        self.started.put(key)
        assert self.open or gate.wait(PATIENCE)
        self.reader.read_into(file, offset, target)

    def next(self):
        """Give (expert, first chunk, chunks) of the next read that starts, and hold it."""
        self.held.append(self.started.get(timeout=PATIENCE))
        return self.held[-1]

    def let(self, count=1):
        """Let the reads that were held first go on."""
        for _ in range(count):
            self.gates[self.held.pop(0)].set()

    def let_all(self):
        self.open = True
        for gate in list(self.gates.values()):
            gate.set()

    def close(self):
        self.reader.close()


@pytest.fixture
def store(tmp_path):
    return Blocks(tmp_path / "blocks.bin")


@pytest.fixture
def arena():
    return Arena()


@pytest.fixture
def gate(store):
    gate = Gate(open_reader(store.files, "seek"))
    yield gate
    gate.let_all()
    gate.close()


@pytest.fixture(autouse=True)
def _no_thread_is_left():
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= before


@pytest.fixture(params=["inline", "threads=1", "threads=3"])
def engine(request, store, arena):
    """Every engine; experts from 100 on cannot be read."""
    store.segments = lambda flat: (Segment(0, flat % 100 * BLOCK, BLOCK, 0),)
    if request.param == "inline":
        engine = InlineTransfers(store, arena.buffer)
        yield engine
        engine.close()
        return
    threads = int(request.param.removeprefix("threads="))
    reader = open_reader(store.files, "seek")
    with ThreadedTransfers(store, arena.buffer, reader, threads, CHUNK) as engine:
        yield engine
    reader.close()


# contract of every engine


def test_contract(engine):
    assert isinstance(engine, TransferEngine)


def test_bytes_land_in_their_slots(engine, store, arena):
    pending = [engine.submit(expert, slot, demand=expert % 2 == 0) for slot, expert in enumerate([3, 8, 0, 11, 5])]
    while pending:
        transfer = engine.wait_any(pending)
        assert transfer.done()
        assert transfer.landed
        assert transfer.error is None
        assert transfer.submitted_s <= transfer.started_s <= transfer.finished_s
        assert transfer.nbytes == BLOCK
        assert arena.buffer(transfer.slot) == store.block(transfer.expert)
        pending.remove(transfer)
    stats = engine.stats()
    assert (stats.demands, stats.prefetches) == (2, 3)
    assert (stats.demand_bytes, stats.prefetch_bytes) == (2 * BLOCK, 3 * BLOCK)
    assert (stats.queued_demands, stats.queued_prefetches) == (0, 0)
    assert stats.failed_demands == stats.failed_prefetches == stats.cancelled == 0


def test_a_slot_is_filled_again(engine, store, arena):
    for expert in (1, 2, 3):
        engine.wait_any([engine.submit(expert, 0, demand=True)])
        assert arena.buffer(0) == store.block(expert)


def test_wait_any_gives_what_is_done_already(engine):
    first = engine.submit(0, 0, demand=True)
    engine.wait_any([first])
    assert engine.wait_any([first]) is first


def test_wait_any_of_nothing_is_a_mistake(engine):
    with pytest.raises(ValueError, match="at least one"):
        engine.wait_any([])


def test_promotion_makes_a_demand(engine, store, arena):
    transfer = engine.submit(4, 2, demand=False)
    engine.promote(transfer)
    engine.wait_any([transfer])
    assert arena.buffer(2) == store.block(4)
    engine.promote(transfer)  # too late to matter
    assert engine.stats().demands + engine.stats().prefetches == 1


def test_cancelled_transfers_end_and_free_their_slots(engine, store, arena):
    transfers = [engine.submit(expert, expert, demand=False) for expert in range(5)]
    dropped = [engine.cancel(transfer) for transfer in transfers]
    again = [engine.submit(expert + 5, expert, demand=True) for expert in range(5)]
    for transfer in again:
        engine.wait_any([transfer])
    for transfer, in_time in zip(transfers, dropped, strict=True):
        assert engine.wait_any([transfer]) is transfer
        assert transfer.cancelled == in_time
        assert transfer.landed != in_time
    for slot in range(5):
        assert arena.buffer(slot) == store.block(slot + 5)
    assert engine.stats().cancelled == sum(dropped)


def test_cancel_of_what_is_done_says_no(engine):
    transfer = engine.submit(1, 1, demand=True)
    engine.wait_any([transfer])
    assert not engine.cancel(transfer)
    assert transfer.landed


def test_a_slot_holds_one_transfer(engine):
    if not isinstance(engine, InlineTransfers):
        engine._reader = Gate(engine._reader)
    first = engine.submit(1, 1, demand=True)
    with pytest.raises(ValueError, match="slot 1 is being filled with expert 1"):
        engine.submit(2, 1, demand=True)
    if not isinstance(engine, InlineTransfers):
        engine._reader.let_all()
    engine.wait_any([first])


def test_close_twice_and_refuse_afterwards(engine):
    transfers = [engine.submit(expert, expert, demand=expert < 3) for expert in range(6)]
    engine.close()
    engine.close()
    assert all(transfer.done() for transfer in transfers)
    for transfer in transfers:
        assert transfer.landed or isinstance(transfer.error, ClosedError)
        assert not engine.cancel(transfer) or transfer.cancelled
        if transfer.demand and transfer.error is not None:
            with pytest.raises(ClosedError):
                engine.wait_any([transfer])
    with pytest.raises(ClosedError):
        engine.submit(0, 0, demand=True)
    engine.stats()


# errors


@pytest.mark.parametrize("threads", [1, 2])
def test_failures_of_a_reader(store, arena, threads):
    reader = FailingReader(open_reader(store.files, "seek"), lambda file, offset: offset // BLOCK == 7)
    with ThreadedTransfers(store, arena.buffer, reader, threads, CHUNK) as engine:
        prefetch = engine.submit(7, 0, demand=False)
        assert engine.wait_any([prefetch]) is prefetch
        assert isinstance(prefetch.error, TransferError)
        assert not prefetch.landed
        engine.wait_any([engine.submit(3, 0, demand=True)])  # the engine goes on
        assert arena.buffer(0) == store.block(3)
        demand, other = engine.submit(7, 1, demand=True), engine.submit(8, 2, demand=True)
        with pytest.raises(TransferError, match=r"Expert 1 of MoE layer 1 .*offset"):
            engine.wait_any([demand])
        engine.wait_any([other])
        assert arena.buffer(2) == store.block(8)
        engine.promote(prefetch)
        with pytest.raises(TransferError):
            engine.wait_any([prefetch])
        stats = engine.stats()
    assert (stats.failed_prefetches, stats.failed_demands) == (1, 1)
    reader.close()


def test_failures_when_told_inline(store, arena):
    engine = InlineTransfers(store, arena.buffer)
    prefetch, demand = engine.submit(1, 0, demand=False), engine.submit(2, 1, demand=True)
    engine.fail(prefetch, TransferError("told to"))
    assert engine.wait_any([prefetch]) is prefetch
    engine.fail(demand, TransferError("told to, too"))
    with pytest.raises(TransferError, match="told to, too"):
        engine.wait_any([demand])
    engine.finish(demand)
    assert not demand.landed
    assert engine.stats().failed_demands == engine.stats().failed_prefetches == 1


def test_a_bug_in_the_arena_reaches_the_waiter(store):
    reader = open_reader(store.files, "seek")
    with ThreadedTransfers(store, lambda slot: memoryview(bytearray(CHUNK)), reader, 1, CHUNK) as engine:
        for slot in range(2):  # the worker lives on
            with pytest.raises(ValueError, match=f"slot {slot} is too short"):
                engine.wait_any([engine.submit(0, slot, demand=True)])
    reader.close()


@pytest.mark.parametrize("options", [{"num_threads": 0}, {"chunk_bytes": 0}, {"chunk_bytes": 1000}])
def test_settings_out_of_range_are_refused(store, arena, gate, options):
    with pytest.raises(SettingError, match=next(iter(options))):
        ThreadedTransfers(store, arena.buffer, gate, **options)


# order, with one worker and a gate


def test_a_demand_pre_empts_a_running_prefetch_which_goes_on_later(store, arena, gate):
    with ThreadedTransfers(store, arena.buffer, gate, 1, CHUNK) as engine:
        prefetch = engine.submit(1, 1, demand=False)
        assert gate.next() == (1, 0, 1)
        demand = engine.submit(2, 2, demand=True)
        gate.let()
        assert gate.next() == (2, 0, 4)  # whole, at the first chunk boundary
        assert not prefetch.done()
        gate.let()
        assert engine.wait_any([prefetch, demand]) is demand
        for chunk in (1, 2, 3):
            assert gate.next() == (1, chunk, 1)
            gate.let()
        assert engine.wait_any([prefetch]) is prefetch
    assert arena.buffer(1) == store.block(1)
    assert arena.buffer(2) == store.block(2)


def test_a_prefetch_waits_while_a_demand_is_read_although_a_worker_is_idle(store, arena, gate):
    with ThreadedTransfers(store, arena.buffer, gate, 2, BLOCK) as engine:
        demand = engine.submit(0, 0, demand=True)
        assert gate.next() == (0, 0, 4)
        prefetch = engine.submit(1, 1, demand=False)
        gate.let()
        engine.wait_any([demand])
        assert gate.next() == (1, 0, 4)
        gate.let()
        engine.wait_any([prefetch])


def test_a_lone_demand_is_shared_out_and_two_are_not(store, arena, gate):
    with ThreadedTransfers(store, arena.buffer, gate, 2, CHUNK) as engine:
        alone = engine.submit(0, 0, demand=True)
        assert sorted(gate.next() for _ in range(2)) == [(0, 0, 2), (0, 2, 2)]
        pair = [engine.submit(expert, expert, demand=True) for expert in (1, 2)]
        gate.let(2)
        engine.wait_any([alone])
        assert sorted(gate.next() for _ in range(2)) == [(1, 0, 4), (2, 0, 4)]
        gate.let(2)
        for transfer in pair:
            engine.wait_any([transfer])
    for expert in range(3):
        assert arena.buffer(expert) == store.block(expert)


def test_a_promoted_prefetch_keeps_what_it_has_and_passes_the_others(store, arena, gate):
    with ThreadedTransfers(store, arena.buffer, gate, 1, CHUNK) as engine:
        first = engine.submit(1, 1, demand=False)
        assert gate.next() == (1, 0, 1)
        second, third = engine.submit(2, 2, demand=False), engine.submit(3, 3, demand=False)
        engine.promote(third)
        gate.let()
        assert gate.next() == (3, 0, 4)
        engine.promote(first)
        gate.let()
        assert engine.wait_any([third]) is third
        assert gate.next() == (1, 1, 3)
        gate.let_all()
        engine.wait_any([first])
        engine.wait_any([second])
        stats = engine.stats()
    assert (stats.demands, stats.prefetches) == (2, 1)
    assert (stats.demand_bytes, stats.prefetch_bytes) == (BLOCK + 3 * CHUNK, BLOCK + CHUNK)
    assert all(arena.buffer(expert) == store.block(expert) for expert in (1, 2, 3))


def test_a_running_prefetch_is_dropped_at_its_next_chunk_and_its_slot_waits_for_it(store, arena, gate):
    with ThreadedTransfers(store, arena.buffer, gate, 2, CHUNK) as engine:
        dropped = engine.submit(1, 0, demand=False)
        assert sorted(gate.next() for _ in range(2)) == [(1, 0, 1), (1, 1, 1)]
        assert engine.cancel(dropped)
        assert engine.cancel(dropped)  # still so
        assert not dropped.done()
        demand = engine.submit(2, 0, demand=True)
        gate.let()  # one of the two pieces: the slot is still written to
        other = engine.submit(3, 1, demand=True)
        assert gate.next() == (3, 0, 4)
        gate.let(2)
        engine.wait_any([dropped])
        engine.wait_any([other])
        gate.let_all()
        engine.wait_any([demand])
        assert arena.buffer(0) == store.block(2)
        assert engine.stats().cancelled == 1


def test_a_transfer_dropped_while_it_waits_for_its_slot_leaves_the_slot_to_the_next(store, arena, gate):
    with ThreadedTransfers(store, arena.buffer, gate, 1, CHUNK) as engine:
        running = engine.submit(1, 0, demand=False)
        assert gate.next() == (1, 0, 1)
        engine.cancel(running)
        waiting = engine.submit(2, 0, demand=False)
        engine.cancel(waiting)
        assert waiting.done()
        last = engine.submit(3, 0, demand=True)
        assert not running.done()
        gate.let()
        assert gate.next() == (3, 0, 4)
        assert running.done()
        gate.let()
        engine.wait_any([last])
    assert arena.buffer(0) == store.block(3)


def test_close_while_busy_lets_the_piece_end_and_joins(store, arena, gate):
    engine = ThreadedTransfers(store, arena.buffer, gate, 1, CHUNK)
    running = engine.submit(0, 0, demand=True)
    gate.next()
    queued = engine.submit(1, 1, demand=True)
    closer = threading.Thread(target=engine.close)
    closer.start()
    with pytest.raises(ClosedError):
        engine.wait_any([queued])
    assert not running.done()
    assert closer.is_alive()
    gate.let()
    with pytest.raises(ClosedError):
        engine.wait_any([running])
    closer.join(PATIENCE)
    assert not closer.is_alive()


def test_busy_seconds_count_overlapping_reads_once():
    clock = ManualClock()
    work = TransferQueue(clock, num_readers=2, chunk_bytes=BLOCK)
    for expert in range(3):
        work.add(expert, expert, (Segment(0, expert * BLOCK, BLOCK, 0),), demand=False)
    first, second = work.take(), work.take()
    clock.advance(1.0)
    assert work.stats().busy_s == 1.0
    work.put_back(first, None)
    clock.advance(0.5)
    work.put_back(second, None)
    clock.advance(10.0)
    third = work.take()
    clock.advance(0.25)
    work.put_back(third, None)
    assert work.stats().busy_s == 1.75
    assert work.take() is None


def test_blocks_of_several_segments_are_read_in_order():
    work = TransferQueue(ManualClock(), num_readers=1, chunk_bytes=CHUNK)
    parts = (Segment(0, 0, 2 * CHUNK, 0), Segment(1, 8 * CHUNK, CHUNK, 2 * CHUNK))
    work.add(0, 0, parts, demand=False)
    taken = []
    while (piece := work.take()) is not None:
        taken.append(piece.segment)
        work.put_back(piece, None)
    assert taken == [Segment(0, 0, CHUNK, 0), Segment(0, CHUNK, CHUNK, CHUNK), Segment(1, 8 * CHUNK, CHUNK, 2 * CHUNK)]


def test_inline_finishes_only_when_told(store, arena):
    engine = InlineTransfers(store, arena.buffer)
    prefetch, late, demand = (engine.submit(e, e, demand=e == 2) for e in range(3))
    assert engine.pending == [demand, prefetch, late]
    assert not demand.done()
    engine.finish(late)
    assert engine.wait_any([prefetch, late, demand]) is late
    assert engine.wait_any([prefetch, demand]) is demand
    assert engine.pending == [prefetch]


def test_inline_without_a_store_only_keeps_the_books():
    engine = InlineTransfers()
    transfer = engine.submit(123, 7, demand=True)
    assert engine.wait_any([transfer]).landed
    assert engine.stats().demands == 1
