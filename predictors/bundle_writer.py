"""Writing predictor bundles: graph, weights and card, whole or not at all. Needs torch; reading them does not."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from ..collect.staging import staged_folder
from ..collect.trace import SequenceRouting
from .base import Predictor
from .bundle import AHEAD, GRAPH, SEQUENCES, WEIGHTS, Bundle, check_target, seal
from .network import LayerNetwork, Network, State, TokenNetwork
from .onnx_graph import export_ahead_graph, export_graph
from .onnx_predictor import OnnxBatchPredictor, OnnxLayerPredictor, OnnxTokenPredictor, step_feeds
from .onnx_session import Session
from .parity import parity
from .rows import fingerprint

VERSIONED = ("foregate", "torch", "onnx", "onnxscript", "onnxruntime", "numpy")
LATENCY_TOKENS = 128  # length at which a sequence graph is timed
REAL_ROWS = 3


def write_bundle(
    out: str | Path,
    network: Network,
    *,
    card: dict[str, Any] | None = None,
    describe: Callable[[Predictor], dict[str, Any]] | None = None,
    real: Sequence[SequenceRouting] = (),
    trained_on: Sequence[SequenceRouting] = (),
    seen: Iterable[int] = (),
) -> Bundle:
    """Export a network to a bundle folder.

    Args:
        out: the folder.
        network: what to export; it is set to evaluation.
        card: further entries for card.json: model, fingerprints, training, metrics, calibration.
        describe: measures the exported predictor and gives entries for the card.
        real: sequences for the parity report, the first few of which are used.
        trained_on: sequences whose fingerprints are kept.
        seen: fingerprints of further ones, as of the bundle that training started from.

    Raises:
        BundleError: if the graph differs from the network by more than 1e-4, or something stands at `out` already.
    """
    from safetensors.numpy import save_file

    out = Path(out)
    check_target(out)
    with staged_folder(out) as folder:
        graph = export_graph(network)
        (folder / GRAPH).write_bytes(graph)
        spec, session = network.spec, Session(graph)
        state: State = network.start(1) if isinstance(network, TokenNetwork) else {}
        rings = list(network.rings) if isinstance(network, TokenNetwork) else []
        entries: dict[str, Any] = {
            **spec.to_json(),
            "window": getattr(network.settings, "window", None) if state else None,
            "settings": network.settings.to_json(),
            "state": list(state),
            "rings": rings,
            **session.signature(),
            "latency_ms": session.latency_ms(_timed_feeds(network)),
            "versions": {name: version(name) for name in VERSIONED} | {"python": platform.python_version()},
        }
        if isinstance(network, LayerNetwork):
            (folder / AHEAD).write_bytes(export_ahead_graph(network))
            ahead = Session(str(folder / AHEAD))
            predictor = OnnxLayerPredictor(spec, session, _arrays(state), rings, ahead, network.reach)
            feeds = {f"state.{name}": state[name].detach().numpy() for name in network.context}
            feeds |= {"layer": np.array(0), "used": np.zeros((1, *spec.shape), np.float32)}
            entries |= {"reach": network.reach, "ahead": ahead.signature(), "ahead_ms": ahead.latency_ms(feeds)}
        elif isinstance(network, TokenNetwork):
            predictor = OnnxTokenPredictor(spec, session, _arrays(state), rings)
        else:
            predictor = OnnxBatchPredictor(spec, session)
        if isinstance(network, TokenNetwork) and network.discount:
            entries["reuse"] = {"target": "discounted uses after the token", "discount": network.discount}
        entries["parity"] = parity(network, predictor, real[:REAL_ROWS])
        tensors = {f"network.{name}": value.detach().numpy() for name, value in network.state_dict().items()}
        tensors |= {f"start.{name}": value for name, value in _arrays(state).items()}
        tensors[SEQUENCES] = np.array(sorted({*seen, *(fingerprint(row) for row in trained_on)}), dtype=np.int64)
        save_file({name: np.asarray(value, order="C") for name, value in tensors.items()}, folder / WEIGHTS)
        seal(folder, entries | (card or {}) | (describe(predictor) if describe else {}))
    return Bundle.open(out)


def _arrays(state: State) -> dict[str, np.ndarray]:
    return {name: value.detach().numpy() for name, value in state.items()}


def _timed_feeds(network: Network) -> dict[str, np.ndarray]:
    """Give one step's inputs, or a sequence's."""
    if isinstance(network, TokenNetwork):
        previous = np.zeros((1, *network.spec.shape), np.float32)
        return step_feeds(np.zeros(1, np.int64), previous, _arrays(network.start(1)))
    ids = np.zeros((1, LATENCY_TOKENS), dtype=np.int64)
    return {"token_ids": ids, "mask": np.ones(ids.shape, dtype=bool)}
