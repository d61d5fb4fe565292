"""Small traces whose routing depends on the token and on the sequence: learnable, not trivial."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from foregate.collect.topology import MoeTopology
from foregate.collect.trace import SequenceRouting
from foregate.predictors.base import PredictorSpec
from foregate.predictors.network import Network, NetworkSettings
from foregate.predictors.rows import statistics

VOCAB = 50


def make_rows(
    topology: MoeTopology, *, sequences: int = 12, tokens: tuple[int, int] = (10, 40), seed: int = 0
) -> list[SequenceRouting]:
    """Draw rows for every stack of a topology."""
    rng = np.random.default_rng(seed)
    tables = [np.random.default_rng(1).normal(size=(VOCAB, layer.num_experts)) for layer in topology.layers]
    rows = []
    for index in range(sequences):
        ids = rng.zipf(1.3, size=rng.integers(*tokens)) % VOCAB
        for stack in topology.stacks:
            chosen = []
            for layer in topology.layers_of(stack):
                size, top_k = topology.layers[layer].num_experts, topology.layers[layer].top_k
                own = rng.normal(size=size)  # the sequence's taste
                scores = 2 * tables[layer][ids] + own + 0.3 * rng.normal(size=(len(ids), size))
                chosen.append(np.argsort(-scores, axis=1)[:, :top_k])
            rows.append(
                SequenceRouting(
                    sequence=str(index),
                    stack=stack,
                    group=f"g{index // 2}",
                    experts=np.concatenate(chosen, axis=1).astype(np.int16),
                    token_ids=ids.astype(np.int32),
                )
            )
    return rows


@pytest.fixture(scope="session")
def draw_rows() -> Callable[..., list[SequenceRouting]]:
    """Give `make_rows`."""
    return make_rows


def build_network(
    settings: NetworkSettings,
    topology: MoeTopology,
    stack: str = "causal",
    rows: list[SequenceRouting] | None = None,
    noise: float = 0.3,
) -> Network:
    """Build a network that knows every second id of a vocabulary, or those of rows and what they say, and add noise."""
    torch.manual_seed(0)
    spec = PredictorSpec(
        family=settings.family, horizon=settings.horizon(stack), topology=topology, stack=stack, vocab_size=VOCAB
    )
    found = None if rows is None else statistics(rows, topology, spec.shape[1])
    network = settings.build(spec, np.arange(0, VOCAB, 2) if found is None else found.token_ids)
    if found is not None:
        network.warm_start(found)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(noise * torch.randn_like(parameter))
    return network.eval()


@pytest.fixture(scope="session")
def build() -> Callable[..., Network]:
    """Give `build_network`."""
    return build_network
