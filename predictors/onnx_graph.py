"""A network as an ONNX graph, and the proof that both agree. Needs torch; what runs the graph later does not.

Token horizon: a step graph, state in and state out, dynamic batch. Batch horizon: a sequence graph, dynamic batch and
length. Graphs give probabilities, so that whoever runs them needs to know nothing of links or absent experts.
"""

# B batch, T tokens, L MoE layers, E experts

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..collect.errors import BundleError
from ..collect.trace import SequenceRouting
from .network import BatchNetwork, Network, TokenNetwork
from .onnx_session import Session, state_names
from .rows import dense, ids_of, many_hot

TOLERANCE = 1e-4
LENGTHS = (1, 20, 77)
BATCHES = (1, 3)
REAL_TOKENS = 200  # of each real sequence
QUIET = ("torch.onnx", "onnxscript", "onnx_ir")  # they report what they skip, at warning level


class _StepGraph(nn.Module):
    def __init__(self, network: TokenNetwork) -> None:
        super().__init__()
        self.network, self.names = network, list(network.start(1))

    def forward(self, token_ids: Tensor, previous: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
        logits, after = self.network.step(token_ids, previous, dict(zip(self.names, state, strict=True)))
        return (self.network.probabilities(logits), *(after[name] for name in self.names))


class _SequenceGraph(nn.Module):
    def __init__(self, network: BatchNetwork) -> None:
        super().__init__()
        self.network = network

    def forward(self, token_ids: Tensor, mask: Tensor) -> Tensor:
        return self.network.probabilities(self.network(token_ids, mask))


@torch.no_grad()
def export_graph(network: Network) -> bytes:
    """Give the serialised ONNX graph of a network, weights included."""
    network.eval()
    batch = torch.export.Dim("batch", min=1)
    if isinstance(network, TokenNetwork):
        graph: nn.Module = _StepGraph(network)
        state = network.start(2)
        num_layers, num_experts = network.spec.shape
        args: tuple[Any, ...] = (
            torch.zeros(2, dtype=torch.int64),
            torch.zeros(2, num_layers, num_experts),
            *state.values(),
        )
        shapes: dict[str, Any] = {
            "token_ids": {0: batch},
            "previous": {0: batch},
            "state": tuple({0: batch} for _ in state),
        }
        inputs = ["token_ids", "previous", *state_names("state", state)]
        outputs = ["probabilities", *state_names("next", state)]
    else:
        assert isinstance(network, BatchNetwork)
        graph = _SequenceGraph(network)
        tokens = torch.export.Dim("tokens", min=1)
        args = (torch.zeros(2, 7, dtype=torch.int64), torch.ones(2, 7, dtype=torch.bool))
        shapes = {"token_ids": {0: batch, 1: tokens}, "mask": {0: batch, 1: tokens}}
        inputs, outputs = ["token_ids", "mask"], ["probabilities"]
    with _quiet():
        program = torch.onnx.export(
            graph.eval(),
            args,
            dynamo=True,
            dynamic_shapes=shapes,
            input_names=inputs,
            output_names=outputs,
            verbose=False,
        )
    assert program is not None
    return program.model_proto.SerializeToString()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep the exporter's notes away: nobody who trains a predictor can do anything about them."""
    loggers = [logging.getLogger(name) for name in QUIET]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def parity(network: Network, graph: bytes, rows: Sequence[SequenceRouting], seed: int = 0) -> dict[str, Any]:
    """Compare a graph with its network over lengths, batches, random and real inputs, state included.

    Step graphs run token by token on their own state and are compared with the network's parallel form.

    Returns:
        {"tolerance", "max_abs_diff", "cases": [{"inputs", "batch", "tokens", "max_abs_diff"}]}

    Raises:
        BundleError: if any output differs by more than `TOLERANCE`.
    """
    network.eval()
    session = Session(graph)
    cases = []
    for what, ids, used, mask in _inputs(network, rows, seed):
        if isinstance(network, TokenNetwork):
            difference = _token_difference(network, session, ids, used)
        else:
            assert isinstance(network, BatchNetwork)
            difference = _batch_difference(network, session, ids, mask)
        cases.append({"inputs": what, "batch": len(ids), "tokens": ids.shape[1], "max_abs_diff": difference})
    worst = max(case["max_abs_diff"] for case in cases)
    if not worst <= TOLERANCE:  # nan fails too
        raise BundleError(
            f"The exported graph of {network.spec.family} differs from the network by {worst:.2g}, more than "
            f"{TOLERANCE:.0e}, so no bundle was written; try another torch or onnxruntime version."
        )
    return {"tolerance": TOLERANCE, "max_abs_diff": worst, "cases": cases}


Inputs = tuple[str, np.ndarray, np.ndarray, np.ndarray]


def _inputs(network: Network, rows: Sequence[SequenceRouting], seed: int) -> Iterator[Inputs]:
    """Give (name, ids [B, T], used [B, T, L, E], mask [B, T]) of each case."""
    rng = np.random.default_rng(seed)
    num_layers, num_experts = network.spec.shape
    for num_tokens in LENGTHS:
        for batch in BATCHES:
            ids = rng.integers(-1, network.spec.vocab_size + 1, (batch, num_tokens))
            scores = rng.random((batch, num_tokens, num_layers, num_experts))
            used = (scores > np.quantile(scores, 0.8, axis=-1, keepdims=True)).astype(np.float32)
            mask = np.arange(num_tokens) < rng.integers(1, num_tokens + 1, (batch, 1))
            yield "random", ids, used, mask
    for row in rows:
        ids = ids_of(row)[None, :REAL_TOKENS]
        used = many_hot(dense(row, network.spec.topology)[:REAL_TOKENS], num_experts)[None]
        yield "trace", ids, used, np.ones(ids.shape, dtype=bool)


@torch.no_grad()
def _token_difference(network: TokenNetwork, session: Session, ids: np.ndarray, used: np.ndarray) -> float:
    previous = np.concatenate([np.zeros_like(used[:, :1]), used[:, :-1]], axis=1)
    start = network.start(len(ids))
    logits, last = network(torch.from_numpy(ids), torch.from_numpy(previous), start)
    wanted = network.probabilities(logits).numpy()
    names = list(start)
    state = [value.numpy() for value in start.values()]
    worst = 0.0
    for t in range(ids.shape[1]):
        feeds = dict(zip(state_names("state", names), state, strict=True))
        given, *state = session.run({"token_ids": ids[:, t], "previous": previous[:, t], **feeds})
        worst = max(worst, float(np.abs(given - wanted[:, t]).max()))
    return max(worst, *(float(np.abs(a - last[n].numpy()).max()) for n, a in zip(names, state, strict=True)))


@torch.no_grad()
def _batch_difference(network: BatchNetwork, session: Session, ids: np.ndarray, mask: np.ndarray) -> float:
    wanted = network.probabilities(network(torch.from_numpy(ids), torch.from_numpy(mask))).numpy()
    (given,) = session.run({"token_ids": ids, "mask": mask})
    return float(np.abs(given - wanted).max())
