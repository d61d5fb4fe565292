"""Small traces whose numbers can be worked out by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from foregate.collect.shard import SequenceRouting
from foregate.collect.topology import MoeTopology
from foregate.collect.trace import Trace
from foregate.runtime.hardware import HardwareProfile

Make = Callable[..., SequenceRouting]


@pytest.fixture(scope="session")
def box() -> HardwareProfile:
    """Give a machine whose times are round: a read of 1 MB takes 1 ms, and so do 10 MB of compute."""
    return HardwareProfile(
        name="box",
        link="a wire",
        link_gb_per_s=1.0,
        link_latency_us=0.0,
        memory_gb_per_s=10.0,
        compute_tflop_per_s=100.0,
        event_overhead_us=0.0,
        cores=2,
    )


@pytest.fixture(scope="session")
def row() -> Make:
    """Make a row from its experts [T][columns]."""

    def make(
        experts: Sequence[Sequence[int]], name: str = "a", ids: Sequence[int] | None = None, **values: object
    ) -> SequenceRouting:
        token_ids = None if ids is None else np.array(ids, np.int32)
        return SequenceRouting(sequence=name, experts=np.array(experts, np.int16), token_ids=token_ids, **values)  # pyright: ignore

    return make


@pytest.fixture(scope="session")
def random_rows(row: Make) -> Callable[..., list[SequenceRouting]]:
    """Draw rows whose experts depend on the token id, so that there is something to foretell."""

    def draw(
        topology: MoeTopology, sequences: int = 12, tokens: int = 24, vocab: int = 20, seed: int = 0
    ) -> list[SequenceRouting]:
        rng = np.random.default_rng(seed)
        table = np.stack(
            [
                np.concatenate([rng.permutation(layer.num_experts)[: layer.top_k] for layer in topology.layers])
                for _ in range(vocab)
            ]
        )
        ids = rng.integers(vocab, size=(sequences, tokens))
        return [row(table[each], f"s{index}", each) for index, each in enumerate(ids)]

    return draw


@pytest.fixture(scope="session")
def npz(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Trace]:
    """Write arrays as an `.npz` trace and open it."""

    def write(experts: np.ndarray, lengths: Sequence[int], **arrays: np.ndarray) -> Trace:
        path: Path = tmp_path_factory.mktemp("npz") / "small.npz"
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        np.savez(path, experts=experts, offsets=offsets, **arrays)  # pyright: ignore
        return Trace.open(path)

    return write
