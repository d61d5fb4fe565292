"""Rings against plain concatenation, under any order of appends from any ring so far."""

from __future__ import annotations

import numpy as np
from foregate.predictors import ring as module
from foregate.predictors.ring import Ring
from hypothesis import given
from hypothesis import strategies as st


@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 3), st.lists(st.integers(0, 30), max_size=25))
def test_appending_is_concatenating_and_dropping(batch, window, room, origins):
    module.ROOM, before = room, module.ROOM
    try:
        start = np.arange(batch * window * 2, dtype=np.float32).reshape(batch, window, 2)
        rings, wanted = [Ring(start)], [start]
        for number, origin in enumerate(origins):
            index = origin % len(rings)
            entry = np.full((batch, 2), 100 + number, np.float32)
            rings.append(rings[index].append(entry))
            wanted.append(np.concatenate([wanted[index][:, 1:], entry[:, None]], axis=1))
        for ring, entries in zip(rings, wanted, strict=True):
            np.testing.assert_array_equal(ring.array(), entries)
    finally:
        module.ROOM = before


def test_a_window_of_one_sequence_is_no_copy():
    ring = Ring(np.zeros((1, 4, 3), np.float32)).append(np.ones((1, 3), np.float32))
    assert ring.array().flags.c_contiguous
    assert np.shares_memory(ring.array(), ring._buffer.entries)
