"""Random operations: no two transfers write one slot at once, what lands was read once and whole, demands go first."""

from __future__ import annotations

import mmap
import os
import random

import pytest
from foregate.collect.errors import TransferError
from foregate.collect.topology import MoeTopology
from foregate.runtime.clock import ManualClock
from foregate.runtime.readers import open_reader
from foregate.runtime.store import Segment
from foregate.runtime.transfer import ThreadedTransfers
from foregate.runtime.transfer_queue import TransferQueue
from hypothesis import given
from hypothesis import strategies as st

CHUNK = 4096
BLOCK = 5 * CHUNK
SLOTS = 4
MOVES = st.lists(
    st.tuples(
        st.sampled_from(
            ["demand", "prefetch", "take", "take", "take", "end", "end", "end", "fail", "cancel", "promote"]
        ),
        st.integers(0, 1000),
    ),
    max_size=120,
)


def segments(expert):
    """Two ranges of one block, in different files."""
    return (Segment(0, expert * BLOCK, 2 * CHUNK, 0), Segment(1, expert * BLOCK, 3 * CHUNK, 2 * CHUNK))


@given(MOVES, st.integers(1, 3))
def test_random_operations_keep_the_guarantees(moves, readers):
    work = TransferQueue(ManualClock(), num_readers=readers, chunk_bytes=CHUNK)
    transfers, reading, read = [], [], {}
    for move, number in moves:
        open_transfers = [item for item in transfers if not item.done() and not item.cancelled]
        if move in ("demand", "prefetch"):
            slot = number % SLOTS
            if any(item.slot == slot for item in open_transfers):
                with pytest.raises(ValueError, match="is being filled"):
                    work.add(number, slot, segments(number), demand=True)
                continue
            transfers.append(work.add(number, slot, segments(number), demand=move == "demand"))
            read[transfers[-1]] = []
        elif move == "take" and len(reading) < readers:
            piece = work.take()
            if piece is not None:
                assert not piece.transfer.done()
                assert not piece.transfer.cancelled
                assert piece.demand or not any(item.demand for item in open_transfers)
                writers = {item.transfer for item in reading if item.transfer.slot == piece.transfer.slot}
                assert writers <= {piece.transfer}
                reading.append(piece)
        elif move in ("end", "fail") and reading:
            piece = reading.pop(number % len(reading))
            read[piece.transfer].append(piece.segment)
            work.put_back(piece, TransferError("injected") if move == "fail" else None)
        elif move == "cancel" and transfers:
            chosen = transfers[number % len(transfers)]
            before = chosen.done()
            assert work.cancel(chosen) == (chosen.cancelled if before else True)
        elif move == "promote" and open_transfers:
            work.promote(open_transfers[number % len(open_transfers)])
        _check(work, transfers, reading, read)
    while reading or work.demands or work.prefetches:
        piece = reading.pop() if reading else work.take()
        assert piece is not None
        read[piece.transfer].append(piece.segment)
        work.put_back(piece, None)
    _check(work, transfers, reading, read)
    assert all(item.done() for item in transfers)
    assert not work.by_slot
    stats = work.stats()
    counted = stats.demands + stats.prefetches + stats.failed_demands + stats.failed_prefetches + stats.cancelled
    assert counted == len(transfers)


def _check(work, transfers, reading, read):
    for item in transfers:
        busy = any(piece.transfer is item for piece in reading)
        assert not (busy and item.done())
        queued = item in work.demands or item in work.prefetches
        assert queued == (not item.done() and not item.cancelled)
        if item.landed:
            ranges = sorted((part.block_offset, part.block_offset + part.nbytes) for part in read[item])
            assert [start for start, _ in ranges] == [0, *(end for _, end in ranges[:-1])]
            assert ranges[-1][1] == BLOCK == item.nbytes


class Blocks:
    block_bytes = BLOCK
    topology = MoeTopology.uniform(1, 32, 2)

    def __init__(self, path):
        self.files = [path]
        self.content = os.urandom(32 * BLOCK)
        path.write_bytes(self.content)

    def segments(self, flat):
        return (Segment(0, flat * BLOCK, BLOCK, 0),)


@pytest.mark.parametrize("seed", range(6))
def test_random_operations_on_threads_land_the_right_bytes(seed, tmp_path):
    chance = random.Random(seed)
    store = Blocks(tmp_path / "blocks")
    view = memoryview(mmap.mmap(-1, SLOTS * BLOCK))
    reader = open_reader(store.files, "auto")
    holder = {}
    with ThreadedTransfers(
        store, lambda slot: view[slot * BLOCK : (slot + 1) * BLOCK], reader, 1 + seed % 3, CHUNK
    ) as engine:
        for _ in range(400):
            slot = chance.randrange(SLOTS)
            before = holder.get(slot)
            if before is not None and not before.done():
                if chance.random() < 0.5:
                    engine.cancel(before)
                else:
                    engine.promote(before)
                    engine.wait_any([before])
            holder[slot] = engine.submit(chance.randrange(32), slot, demand=chance.random() < 0.3)
            if chance.random() < 0.3:
                engine.wait_any(list(holder.values()))
        while pending := [item for item in holder.values() if not item.done()]:
            engine.wait_any(pending)
        for slot, item in holder.items():
            assert item.landed
            wanted = store.content[item.expert * BLOCK : (item.expert + 1) * BLOCK]
            assert view[slot * BLOCK : (slot + 1) * BLOCK] == wanted
    reader.close()
