"""Rows and headers that tests of traces share."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from foregate.collect.topology import MoeLayer, MoeTopology
from foregate.collect.trace import SequenceRouting, TraceHeader

MakeRow = Callable[..., SequenceRouting]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Run tiny models on one thread: on a busy machine several wait for each other longer than they work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def topology() -> MoeTopology:
    """Give 3 causal layers of different size and top-k: 8 experts top-2, 6 top-3, 4 top-1."""
    sizes = [(8, 2), (6, 3), (4, 1)]
    return MoeTopology(
        layers=tuple(MoeLayer(stack="causal", block=i, num_experts=e, top_k=k) for i, (e, k) in enumerate(sizes)),
        hidden_size=16,
        expert_bytes=96,
        dense_bytes=4096,
    )


@pytest.fixture
def header(topology: MoeTopology) -> TraceHeader:
    """Give a header of that topology."""
    return TraceHeader(topology=topology, model="tiny", vocab_size=100, dtype="float32", seed=3)


def random_row(
    topology: MoeTopology, sequence: str, num_tokens: int, seed: int = 0, **values: object
) -> SequenceRouting:
    """Draw a legal row: distinct experts per token and layer, positive weights."""
    generator = np.random.default_rng((*sequence.encode(), num_tokens))
    stack = values.get("stack", "causal")
    columns = [
        np.argsort(generator.random((num_tokens, layer.num_experts)), axis=1)[:, : layer.top_k]
        for layer in topology.layers
        if layer.stack == stack
    ]
    experts = np.concatenate(columns, axis=1).astype(np.int16)
    given = {
        "sequence": sequence,
        "experts": experts,
        "token_ids": generator.integers(0, 100, num_tokens, dtype=np.int32),
        "weights": generator.random(experts.shape).astype(np.float16),
        **values,
    }
    return SequenceRouting(**given)  # type: ignore[arg-type]


@pytest.fixture
def make_row(topology: MoeTopology) -> MakeRow:
    """Give a maker of legal rows: make_row(sequence, num_tokens, **columns)."""
    return lambda sequence, num_tokens=5, **values: random_row(topology, sequence, num_tokens, **values)
