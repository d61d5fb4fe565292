"""Traces on disk that a small predictor learns in seconds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from foregate.predictors import bundle_writer
from foregate.predictors.network import Network
from foregate.train import fit as fit_file
from foregate.train.module import PredictorModule
from safetensors.torch import save

VOCAB = 40


@pytest.fixture(scope="session", autouse=True)
def _equal_networks_are_exported_once() -> Iterator[None]:
    """Keep graphs by settings, spec and weights, since the exporter takes many seconds and gives the same again."""
    kept: dict[tuple[str, str, bytes], bytes] = {}
    export_graph = bundle_writer.export_graph

    def export(network: Network) -> bytes:
        weights = save({name: value.contiguous() for name, value in network.state_dict().items()})
        key = (repr(network.settings), repr(network.spec), weights)
        if key not in kept:
            kept[key] = export_graph(network)
        return kept[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bundle_writer, "export_graph", export)
        yield


class Exported:
    """Stands in for a bundle where the test is about training alone."""

    card: dict = {"metrics": {}, "latency_ms": {}}  # noqa: RUF012

    def __init__(self, module: PredictorModule) -> None:
        self.spec, self.module, self.path = module.network.spec, module, None


@pytest.fixture
def no_export(monkeypatch) -> list[PredictorModule]:
    """Give the modules that would have been exported."""
    kept: list[PredictorModule] = []

    def export(module, data, out, run=None):
        kept.append(module)
        return Exported(module)

    monkeypatch.setattr(fit_file, "export", export)
    return kept


def write_trace(path: Path, *, sequences: int = 24, tokens: int = 40, seed: int = 0, ids: bool = True) -> Path:
    """Write an .npz of 2 layers x 8 experts, top-2: the token decides one expert, the sequence the other."""
    rng = np.random.default_rng(seed)
    table = np.random.default_rng(1).integers(0, 4, (VOCAB, 2))
    lengths = rng.integers(tokens // 2, tokens, sequences)
    token_ids, experts = [], []
    for length in lengths:
        drawn = rng.integers(0, VOCAB, length)
        taste = 4 + rng.integers(0, 4, 2)
        experts.append(np.stack([table[drawn], np.broadcast_to(taste, (length, 2))], axis=-1))
        token_ids.append(drawn)
    arrays = {
        "experts": np.concatenate(experts).astype(np.uint8),
        "offsets": np.concatenate([[0], np.cumsum(lengths)]),
        "conversation": np.arange(sequences) // 2,
    }
    if ids:
        arrays["token_ids"] = np.concatenate(token_ids).astype(np.int32)
    np.savez(path, **arrays)
    return path


@pytest.fixture(scope="session")
def write() -> Callable[..., Path]:
    """Give `write_trace`."""
    return write_trace


@pytest.fixture(scope="session")
def trace(tmp_path_factory) -> Path:
    """Give one such trace."""
    return write_trace(tmp_path_factory.mktemp("trace") / "t.npz")
