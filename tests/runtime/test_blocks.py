"""Block layouts: alignment, gaps, JSON, filling by name."""

from __future__ import annotations

import itertools

import pytest
import torch
from foregate.runtime.blocks import (
    ALIGNMENT,
    DTYPE_BYTES,
    TENSOR_ALIGNMENT,
    BlockLayout,
    align,
    dtype_name,
    fill,
    layout_of,
    plan_layout,
    views,
)
from hypothesis import given
from hypothesis import strategies as st

SHAPES = st.lists(st.integers(1, 40), min_size=1, max_size=3).map(tuple)
PARTS = st.lists(st.tuples(SHAPES, st.sampled_from(sorted(DTYPE_BYTES))), min_size=1, max_size=5)


def named(parts):
    return [(f"tensor_{index}", shape, dtype) for index, (shape, dtype) in enumerate(parts)]


@given(PARTS)
def test_tensors_and_gaps_tile_the_block(parts):
    layout = plan_layout(named(parts))
    ranges = sorted([(spec.offset, spec.offset + spec.nbytes) for spec in layout.tensors] + layout.gaps)
    assert ranges[0][0] == 0
    assert ranges[-1][1] == layout.nbytes
    assert all(left[1] == right[0] for left, right in itertools.pairwise(ranges))
    assert layout.nbytes % ALIGNMENT == 0
    assert all(spec.offset % TENSOR_ALIGNMENT == 0 for spec in layout.tensors)
    assert layout.nbytes - layout.payload_bytes < ALIGNMENT + TENSOR_ALIGNMENT * len(parts)


@given(PARTS)
def test_json_keeps_a_layout(parts):
    layout = plan_layout(named(parts))
    assert BlockLayout.from_json(layout.to_json()) == layout


@pytest.mark.parametrize(
    "change",
    [
        {"nbytes": 4095},
        {"nbytes": 0},
        {"tensors": [{"name": "a", "shape": [64], "dtype": "U8", "offset": 1}]},
        {"tensors": [{"name": n, "shape": [64], "dtype": "U8", "offset": 0} for n in "ab"]},
    ],
)
def test_json_of_an_impossible_layout_is_refused(change):
    value = {"nbytes": 4096, "tensors": [{"name": "a", "shape": [64], "dtype": "U8", "offset": 0}]}
    BlockLayout.from_json(value)
    with pytest.raises(ValueError, match=r"starts at|a block of"):
        BlockLayout.from_json({**value, **change})


def test_docstring_example():
    layout = plan_layout([("gate_up_proj", (96, 128), "BF16"), ("down_proj", (128, 48), "BF16")])
    assert [spec.nbytes for spec in layout.tensors] == [24_576, 12_288]
    assert layout.nbytes == 36_864


def test_fill_and_views_round_trip():
    tensors = {"a": torch.randn(3, 5), "b": torch.randn(7).to(torch.bfloat16), "c": torch.arange(5)}
    layout = layout_of(tensors)
    block = bytearray(b"\xff" * layout.nbytes)
    fill(block, layout, tensors)
    for name, view in views(block, layout).items():
        assert torch.equal(view, tensors[name])
    assert all(not any(block[start:end]) for start, end in layout.gaps)


@pytest.mark.parametrize(
    "tensors",
    [
        {"a": torch.zeros(2)},
        {"a": torch.zeros(2), "b": torch.zeros(2), "c": torch.zeros(2)},
        {"a": torch.zeros(2), "b": torch.zeros(3)},
        {"a": torch.zeros(2), "b": torch.zeros(2, dtype=torch.float16)},
    ],
    ids=["missing", "extra", "shape", "dtype"],
)
def test_fill_refuses_other_tensors(tensors):
    layout = layout_of({"a": torch.zeros(2), "b": torch.zeros(2)})
    with pytest.raises(ValueError, match=r"expected tensors|must be"):
        fill(bytearray(layout.nbytes), layout, tensors)


def test_views_show_the_buffer_itself():
    layout = layout_of({"a": torch.zeros(4)})
    block = bytearray(layout.nbytes)
    views(block, layout)["a"].fill_(1.0)
    assert bytes(block[:4]) == bytes(memoryview(torch.ones(1).numpy()).cast("B"))


def test_dtype_names():
    assert dtype_name(torch.bfloat16) == "BF16"
    assert dtype_name(torch.float32) == "F32"
    with pytest.raises(ValueError, match="complex64"):
        dtype_name(torch.complex64)


@given(st.integers(0, 10**9))
def test_align(value):
    assert 0 <= align(value) - value < ALIGNMENT
    assert align(value) % ALIGNMENT == 0
