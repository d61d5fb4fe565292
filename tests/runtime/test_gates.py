"""Gates of some rows have the bits of a gate over all rows, whatever the sizes and however many threads there are."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from foregate.runtime.gates import PIECE, FlatGate, Gate, RowGate, WholeGate, choose_gate, pieces
from hypothesis import given, settings
from hypothesis import strategies as st


def halves(up: torch.Tensor) -> torch.Tensor:
    gate, value = up.chunk(2, -1)
    return torch.nn.functional.silu(gate) * value


def interleaved(up: torch.Tensor) -> torch.Tensor:
    gate, value = up[..., ::2], up[..., 1::2]
    return gate * torch.sigmoid(gate * 1.702) * (value + 1)


MODULES: dict[str, Any] = {
    "halves": SimpleNamespace(has_gate=True, is_concatenated=True, _apply_gate=halves),
    "interleaved": SimpleNamespace(has_gate=True, is_concatenated=False, _apply_gate=interleaved),
    "no gate": SimpleNamespace(has_gate=False, is_concatenated=True, act_fn=torch.nn.SiLU()),
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def gated(gate: Gate, up_SP: torch.Tensor, cuts: set[int]) -> torch.Tensor:
    """Gate the rows between the cuts, each part for itself."""
    bounds = [0, *sorted(cut for cut in cuts if 0 < cut < len(up_SP)), len(up_SP)]
    return torch.cat([gate.rows(up_SP[a:b].clone(), a, len(up_SP)) for a, b in itertools.pairwise(bounds)])


@pytest.mark.parametrize("kind", sorted(MODULES))
@given(
    dtype=st.sampled_from(sorted(DTYPES)),
    width=st.sampled_from([16, 48, 64, 100, 768]),
    numbers=st.integers(1, 5 * PIECE),
    threads=st.integers(1, 4),
    shares=st.sets(st.floats(0, 1), max_size=4),
)
@settings(max_examples=25, deadline=None)
def test_parts_have_the_bits_of_the_whole(
    kind: str, dtype: str, width: int, numbers: int, threads: int, shares: set[float]
) -> None:
    module, total = MODULES[kind], -(-numbers // width)
    torch.set_num_threads(threads)  # restored after each test by the fixture of all
    generator = torch.Generator().manual_seed(numbers)
    up_SP = 2 * torch.randn(total, width * (2 if module.has_gate else 1), generator=generator)
    up_SP = up_SP.to(DTYPES[dtype])
    gate = RowGate(module) if kind == "halves" else FlatGate(module)
    expected = module._apply_gate(up_SP) if module.has_gate else module.act_fn(up_SP)
    assert torch.equal(gated(gate, up_SP, {int(share * total) for share in shares}), expected)


@pytest.mark.parametrize("threads", [2, 3, 4])
@pytest.mark.parametrize("kind", sorted(MODULES))
def test_many_rows_are_shared_out_to_threads(kind: str, threads: int) -> None:
    module = MODULES[kind]
    gate = RowGate(module) if kind == "halves" else FlatGate(module)
    torch.set_num_threads(threads)
    for total, cuts in ((993, {400, 496}), (1501, {700}), (2731, {1001, 1002}), (4005, {1333, 3001})):
        up_SP = 2 * torch.randn(total, 96 if module.has_gate else 48, generator=torch.Generator().manual_seed(total))
        expected = module._apply_gate(up_SP) if module.has_gate else module.act_fn(up_SP)
        assert torch.equal(gated(gate, up_SP, cuts), expected)


def test_a_thread_begins_in_mid_row() -> None:
    torch.set_num_threads(2)
    assert pieces(993 * 48) == [(0, 23832), (23832, 47664)]
    assert pieces(PIECE) == [(0, PIECE)]
    torch.set_num_threads(4)
    assert pieces(PIECE + 1) == [(0, 16385), (16385, 32769)], "two pieces for four threads: each has enough to do"
    torch.set_num_threads(1)
    assert pieces(10 * PIECE) == [(0, 10 * PIECE)]


@pytest.mark.parametrize(
    ("kind", "name"), [("halves", "row"), ("interleaved", "flat"), ("no gate", "flat"), ("blind", "whole")]
)
def test_the_layout_decides_and_a_probe_confirms(kind: str, name: str) -> None:
    state = torch.random.get_rng_state()
    blind = SimpleNamespace(has_gate=True, is_concatenated=True, _apply_gate=lambda up: halves(up - up.mean()))
    module = MODULES.get(kind, blind)
    gate = choose_gate(module, 48, torch.float32)
    assert gate.name == name
    assert torch.equal(state, torch.random.get_rng_state())


def test_a_whole_gate_sees_rows_at_their_place() -> None:
    module = SimpleNamespace(has_gate=False, act_fn=lambda up: torch.cumsum((up != 0).float(), 0))
    assert WholeGate(module).rows(torch.ones(2, 3), 2, 6).tolist() == [[1, 1, 1], [2, 2, 2]]
    assert WholeGate(module).rows(torch.ones(2, 3), 2, 6).shape == (2, 3)
