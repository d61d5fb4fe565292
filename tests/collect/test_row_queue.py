"""The queue before the writer thread: order, bounds, and that nobody waits for somebody who waits for more."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
from foregate.collect.row_queue import RowQueue, num_bytes
from foregate.collect.sequence import SequenceRouting

PATIENCE = 60.0  # seconds until a test that hangs fails


def row(name: str, tokens: int = 4) -> SequenceRouting:
    return SequenceRouting(sequence=name, experts=np.zeros((tokens, 2), np.int16))


def in_thread(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def drain(queue: RowQueue) -> list[str]:
    names = []
    while (rows := queue.get()) is not None:
        names += [item.sequence for item in rows]
    return names


@pytest.mark.parametrize("count", [0, 1, 3, 4, 5, 64, 65, 200])
def test_the_end_hands_out_all_that_waits_in_order(count: int) -> None:
    queue, found = RowQueue(64, 10**9), list[str]()
    getter = in_thread(lambda: found.extend(drain(queue)))
    for index in range(count):
        queue.put([row(str(index))])
    queue.put(None)
    getter.join(PATIENCE)
    assert not getter.is_alive()
    assert found == [str(index) for index in range(count)]


def test_a_quarter_of_the_calls_wakes_the_getter_without_an_end() -> None:
    queue, taken = RowQueue(16, 10**9), threading.Semaphore(0)

    def get_for_ever() -> None:
        while queue.get() is not None:
            taken.release()

    getter = in_thread(get_for_ever)
    for index in range(4):
        queue.put([row(str(index))])
    assert all(taken.acquire(timeout=PATIENCE) for _ in range(4))
    queue.put(None)
    getter.join(PATIENCE)
    assert not getter.is_alive()


@pytest.mark.parametrize("sizes", [(30, 31, 1, 1), (10, 10, 80, 10), (400, 1, 400, 1), (1, 60, 60, 1, 60)])
def test_putters_that_lack_room_wake_the_getter(sizes: tuple[int, ...]) -> None:
    """Whatever the sizes: rows below a quarter of the calls and half of the bytes wait, until somebody lacks room."""
    queue, found = RowQueue(1000, 60 * num_bytes(row("", 1))), list[str]()
    getter = in_thread(lambda: found.extend(drain(queue)))

    def put_all(name: str) -> None:
        for size in sizes:
            queue.put([row(name, size)])

    putters = [in_thread(partial(put_all, name)) for name in ("a", "b", "c")]
    for putter in putters:
        putter.join(PATIENCE)
        assert not putter.is_alive()
    queue.put(None)
    getter.join(PATIENCE)
    assert not getter.is_alive()
    assert sorted(found) == sorted(["a", "b", "c"] * len(sizes))


def test_a_failure_frees_who_waits_and_keeps_the_end() -> None:
    queue = RowQueue(1, 10**9)
    queue.put([row("0")])
    putter = in_thread(lambda: queue.put([row("1")]))
    queue.fail()
    putter.join(PATIENCE)
    assert not putter.is_alive()
    queue.put([row("2")])
    queue.put(None)
    assert queue.get() is None
