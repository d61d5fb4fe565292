"""The slot arena: aligned, equal, distinct slots and tensors that look into them."""

from __future__ import annotations

import pytest
import torch
from foregate.collect.errors import SettingError
from foregate.runtime.blocks import fill, plan_layout
from foregate.runtime.slots import SlotArena

LAYOUT = plan_layout([("up", (4, 8), "F32"), ("down", (8, 4), "BF16")])


def test_slots_are_aligned_equal_and_zero() -> None:
    arena = SlotArena(3, 5000)
    assert arena.slot_bytes == 8192
    assert arena.nbytes == 3 * 8192
    for slot in range(3):
        buffer = arena.buffer(slot)
        assert len(buffer) == 8192
        assert torch.frombuffer(buffer, dtype=torch.uint8).data_ptr() % 4096 == 0
        assert not any(buffer)


def test_tensors_show_what_is_in_their_slot_and_in_no_other() -> None:
    arena = SlotArena(2, LAYOUT.nbytes)
    first, second = arena.tensors(0, LAYOUT), arena.tensors(1, LAYOUT)
    up, down = torch.randn(4, 8), torch.randn(8, 4).bfloat16()
    fill(arena.buffer(1), LAYOUT, {"up": up, "down": down})
    assert torch.equal(second["up"], up)
    assert torch.equal(second["down"], down)
    assert not first["up"].any()
    assert arena.tensors(1, LAYOUT)["up"] is second["up"]


def test_a_slot_may_hold_blocks_of_several_layouts() -> None:
    small = plan_layout([("up", (2, 2), "F32")])
    arena = SlotArena(1, LAYOUT.nbytes)
    fill(arena.buffer(0)[: small.nbytes], small, {"up": torch.ones(2, 2)})
    assert torch.equal(arena.tensors(0, small)["up"], torch.ones(2, 2))
    assert arena.tensors(0, LAYOUT)["up"].shape == (4, 8)


@pytest.mark.parametrize("sizes", [(0, 4096), (2, 0), (-1, 4096)])
def test_nothing_to_hold_is_refused(sizes: tuple[int, int]) -> None:
    with pytest.raises(SettingError, match="at least 1 slot of 1 byte"):
        SlotArena(*sizes)


def test_more_than_there_can_be_is_refused() -> None:
    with pytest.raises(SettingError, match=r"cannot be allocated .*; give fewer slots"):
        SlotArena(1 << 50, 1 << 20)
