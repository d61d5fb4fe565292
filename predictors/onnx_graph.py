"""A network as ONNX graphs. Needs torch; what runs the graphs later does not.

Token horizon: a step graph, state in and state out, dynamic batch. Layer horizon: a step graph, and a second one that
is run after each layer. Batch horizon: a sequence graph, dynamic batch and length. Graphs give probabilities, so that
whoever runs them needs to know nothing of links or absent experts.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from .network import BatchNetwork, LayerNetwork, Network, TokenNetwork
from .onnx_session import after_names, state_names

QUIET = ("torch.onnx", "onnxscript", "onnx_ir")  # they report what they skip, at warning level


class _StepGraph(nn.Module):
    def __init__(self, network: TokenNetwork) -> None:
        super().__init__()
        self.network, self.names = network, list(network.start(1))

    def forward(self, token_ids: Tensor, previous: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
        logits, after = self.network.step(token_ids, previous, dict(zip(self.names, state, strict=True)))
        reuse = () if logits.reuse is None else (self.network.shares(logits.reuse),)
        return (self.network.probabilities(logits.routing), *reuse, *(after[name] for name in self.names))


class _AheadGraph(nn.Module):
    def __init__(self, network: LayerNetwork) -> None:
        super().__init__()
        self.network = network
        self.rows: Tensor
        self.register_buffer("rows", torch.arange(network.spec.shape[0]))

    def forward(self, layer: Tensor, used: Tensor, *context: Tensor) -> Tensor:
        known = used * (self.rows <= layer)[:, None]
        logits = self.network.ahead(layer, known, dict(zip(self.network.context, context, strict=True)))
        inside = (self.rows > layer) & (self.rows <= layer + self.network.reach)
        return self.network.probabilities(logits) * inside[:, None]


class _SequenceGraph(nn.Module):
    def __init__(self, network: BatchNetwork) -> None:
        super().__init__()
        self.network = network

    def forward(self, token_ids: Tensor, mask: Tensor) -> Tensor:
        return self.network.probabilities(self.network(token_ids, mask))


def export_graph(network: Network) -> bytes:
    """Give the serialised ONNX graph of a network, weights included: of a step, or of a sequence."""
    network.eval()
    if isinstance(network, TokenNetwork):
        state = network.start(2)
        args = (*_no_tokens(network), *state.values())
        outputs = ["probabilities", *(["reuse"] if network.discount else []), *after_names(state, network.rings)]
        names = ["token_ids", "previous", *state_names("state", state)]
        return _export(_StepGraph(network), args, names, outputs, {}, "state")
    assert isinstance(network, BatchNetwork)
    args = (torch.zeros(2, 7, dtype=torch.int64), torch.ones(2, 7, dtype=torch.bool))
    return _export(_SequenceGraph(network), args, ["token_ids", "mask"], ["probabilities"], {1: "tokens"})


def export_ahead_graph(network: LayerNetwork) -> bytes:
    """Give the serialised ONNX graph that is run after each layer of a token."""
    network.eval()
    state = network.start(2)
    context = {name: state[name] for name in network.context}
    args = (torch.tensor(0), _no_tokens(network)[1], *context.values())
    return _export(
        _AheadGraph(network),
        args,
        ["layer", "used", *state_names("state", context)],
        ["probabilities"],
        {},
        "context",
    )


def _no_tokens(network: TokenNetwork) -> tuple[Tensor, Tensor]:
    return torch.zeros(2, dtype=torch.int64), torch.zeros(2, *network.spec.shape)


@torch.no_grad()
def _export(
    graph: nn.Module,
    args: tuple[Tensor, ...],
    inputs: list[str],
    outputs: list[str],
    further: dict[int, str],
    rest: str | None = None,
) -> bytes:
    """Export with a dynamic batch, the first dimension of all that is no scalar, and `further` dynamic dimensions.

    `rest` names the graph's argument that takes all inputs beyond the second.
    """
    dynamic = {0: torch.export.Dim("batch", min=1)} | {
        place: torch.export.Dim(name, min=1) for place, name in further.items()
    }
    shapes: dict[str, Any] = {
        name: dynamic if value.ndim else None for name, value in list(zip(inputs, args, strict=True))[:2]
    }
    if rest is not None:
        shapes[rest] = tuple(dynamic for _ in args[2:])
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
