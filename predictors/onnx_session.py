"""ONNX Runtime on one core, without spinning: a predictor runs beside the model and must not take its cores.

Knows arrays and graphs; knows no predictor. onnxruntime is imported when the first session is made.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from ..collect.errors import BundleError

if TYPE_CHECKING:
    import onnxruntime

WARMUP_RUNS = 10
TIMED_RUNS = 200


def state_names(prefix: str, names: Iterable[str]) -> list[str]:
    """Name the graph's state tensors, as `state.NAME`."""
    return [f"{prefix}.{name}" for name in names]


def after_names(names: Iterable[str], rings: Collection[str]) -> list[str]:
    """Name what a step gives of its state: `next.NAME`, and `append.NAME` for the newest entry of a ring."""
    return [f"append.{name}" if name in rings else f"next.{name}" for name in names]


class Session:
    """Run one ONNX graph with a single intra-op thread."""

    def __init__(self, graph: bytes | str) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.execution_mode = onnxruntime.ExecutionMode.ORT_SEQUENTIAL
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        options.add_session_config_entry("session.inter_op.allow_spinning", "0")
        options.log_severity_level = 3  # errors; warnings are about graph optimisations that were skipped
        try:
            self._session: onnxruntime.InferenceSession = onnxruntime.InferenceSession(
                graph, options, providers=["CPUExecutionProvider"]
            )
        except Exception as error:  # onnxruntime's own exceptions share no base below Exception
            raise BundleError(
                f"onnxruntime {onnxruntime.__version__} cannot load the predictor's graph ({error}); export it again."
            ) from error
        self._outputs = [item.name for item in self._session.get_outputs()]

    def run(self, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
        """Run the graph and give its outputs in order; the GIL is released meanwhile."""
        return self._session.run(self._outputs, feeds)  # pyright: ignore[reportReturnType]

    def signature(self) -> dict[str, list[dict[str, Any]]]:
        """Give name, type and shape of inputs and outputs; dynamic dimensions are names."""

        def describe(items: Any) -> list[dict[str, Any]]:
            return [{"name": item.name, "type": item.type, "shape": list(item.shape)} for item in items]

        return {"inputs": describe(self._session.get_inputs()), "outputs": describe(self._session.get_outputs())}

    def latency_ms(self, feeds: dict[str, np.ndarray]) -> dict[str, float]:
        """Time single runs: {"p50", "p99"} in milliseconds."""
        seconds = []
        for _ in range(WARMUP_RUNS + TIMED_RUNS):
            start = time.perf_counter()
            self.run(feeds)
            seconds.append(time.perf_counter() - start)
        p50, p99 = np.quantile(seconds[WARMUP_RUNS:], [0.5, 0.99]) * 1e3
        return {"p50": round(float(p50), 4), "p99": round(float(p99), 4)}
