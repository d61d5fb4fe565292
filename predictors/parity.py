"""The proof that exported graphs say what their network says: the parity report of a bundle. Needs torch."""

# B batch, T tokens, L MoE layers, E experts

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..collect.errors import BundleError
from ..collect.trace import SequenceRouting
from .base import LayerPredictor, Predictor, Step
from .network import BatchNetwork, LayerNetwork, Network, TokenNetwork
from .onnx_predictor import OnnxBatchPredictor, OnnxTokenPredictor, arrays_of
from .rows import dense, ids_of, many_hot

TOLERANCE = 1e-4
LENGTHS = (1, 20, 77)
BATCHES = (1, 3)
REAL_TOKENS = 200  # of each real sequence

Inputs = tuple[str, np.ndarray, np.ndarray, np.ndarray]


def parity(network: Network, predictor: Predictor, rows: Sequence[SequenceRouting], seed: int = 0) -> dict[str, Any]:
    """Compare graphs with their network over lengths, batches, random and real inputs, state included.

    Step graphs run token by token on their own state and are compared with the network's parallel form.

    Returns:
        {"tolerance", "max_abs_diff", "cases": [{"inputs", "batch", "tokens", "max_abs_diff"}]}

    Raises:
        BundleError: if any output differs by more than `TOLERANCE`.
    """
    network.eval()
    cases = []
    for what, ids, used, mask in _inputs(network, rows, seed):
        if isinstance(network, TokenNetwork):
            assert isinstance(predictor, OnnxTokenPredictor)
            difference = _token_difference(network, predictor, ids, used)
        else:
            assert isinstance(network, BatchNetwork)
            assert isinstance(predictor, OnnxBatchPredictor)
            difference = _batch_difference(network, predictor, ids, mask)
        cases.append({"inputs": what, "batch": len(ids), "tokens": ids.shape[1], "max_abs_diff": difference})
    worst = max(case["max_abs_diff"] for case in cases)
    if worst > TOLERANCE:
        raise BundleError(
            f"The exported graph of {network.spec.family} differs from the network by {worst:.2g}, more than "
            f"{TOLERANCE:.0e}, so no bundle was written; try another torch or onnxruntime version."
        )
    return {"tolerance": TOLERANCE, "max_abs_diff": worst, "cases": cases}


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
def _token_difference(network: TokenNetwork, predictor: OnnxTokenPredictor, ids: np.ndarray, used: np.ndarray) -> float:
    previous = np.concatenate([np.zeros_like(used[:, :1]), used[:, :-1]], axis=1)
    inputs, start = (torch.from_numpy(ids), torch.from_numpy(previous)), network.start(len(ids))
    layered: list[Tensor] = []
    if isinstance(network, LayerNetwork):
        assert isinstance(predictor, LayerPredictor)
        truth = torch.from_numpy(used)
        layered = [network.probabilities(network.layers(*inputs, truth, start, n + 1)[1]) for n in range(network.reach)]
    logits, last = network(*inputs, start)
    wanted = network.probabilities(logits.routing).numpy()
    reuse = None if logits.reuse is None else network.shares(logits.reuse).numpy()
    worst, state = 0.0, predictor.start(len(ids))
    for t in range(ids.shape[1]):
        given, state = predictor.step(Step(ids[:, t], previous[:, t]), state)
        worst = max(worst, _gap(given.routing, wanted[:, t]))
        if reuse is not None:
            worst = max(worst, float("inf") if given.reuse is None else _gap(given.reuse, reuse[:, t]))
        if layered and isinstance(predictor, LayerPredictor):
            worst = max(worst, _layer_difference(predictor, layered, used, t, state))
    after = arrays_of(state)
    return max(worst, *(_gap(after[name], value.numpy()) for name, value in last.items()))


def _layer_difference(
    predictor: LayerPredictor, layered: list[Tensor], used: np.ndarray, t: int, state: object
) -> float:
    """Compare every call of a token's layers with the parallel form of the same stride."""
    worst, rows = 0.0, used.shape[2]
    for layer in range(-1, rows - 1):
        given = predictor.ahead(layer, used[:, t], state)
        for stride, wanted in enumerate(layered, start=1):
            if layer + stride < rows:
                worst = max(worst, _gap(given[:, layer + stride], wanted[:, t, layer + stride].numpy()))
    return worst


@torch.no_grad()
def _batch_difference(network: BatchNetwork, predictor: OnnxBatchPredictor, ids: np.ndarray, mask: np.ndarray) -> float:
    wanted = network.probabilities(network(torch.from_numpy(ids), torch.from_numpy(mask))).numpy()
    return _gap(predictor.predict(ids, mask), wanted)


def _gap(given: np.ndarray, wanted: np.ndarray) -> float:
    """Give the largest difference; infinity where one is no number, which `max` would lose."""
    return float(np.nan_to_num(np.abs(given - wanted), nan=np.inf).max(initial=0.0))
