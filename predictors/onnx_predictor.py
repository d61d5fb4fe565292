"""Predictors from exported graphs, run by onnxruntime alone: no torch, one thread, state in the caller's hands.

Thread-safe as onnxruntime sessions are: state is an argument, so sequences interleave freely.
"""

# B batch, T tokens, L MoE layers, E experts

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from ..collect.errors import SettingError
from .base import Prediction, PredictorSpec, Step
from .onnx_session import Session, state_names
from .ring import Ring

State = dict[str, np.ndarray]
Held = dict[str, np.ndarray | Ring]  # between steps


def step_feeds(token_ids: np.ndarray, previous: np.ndarray, state: State) -> dict[str, np.ndarray]:
    """Name a step's inputs as the graph does."""
    return {"token_ids": token_ids, "previous": previous, **named(state)}


def named(state: State) -> dict[str, np.ndarray]:
    """Name state as the graph does."""
    return dict(zip(state_names("state", state), state.values(), strict=True))


def arrays_of(state: Held) -> State:
    """Give a state as the graph takes it: rings as arrays [B, W, ...]."""
    return {name: np.ascontiguousarray(v.array()) if isinstance(v, Ring) else v for name, v in state.items()}


class OnnxTokenPredictor:
    """Predict all MoE layers of the next token; satisfies `TokenPredictor`."""

    def __init__(self, spec: PredictorSpec, session: Session, start: State, rings: Collection[str] = ()) -> None:
        self.spec, self._session, self._start, self._rings = spec, session, start, frozenset(rings)

    def start(self, batch: int) -> Held:
        """Give the state before the first token of `batch` sequences: named arrays, the batch first."""
        whole = {name: np.repeat(value, batch, axis=0) for name, value in self._start.items()}
        return {name: Ring(value) if name in self._rings else value for name, value in whole.items()}

    def step(self, step: Step, state: object) -> tuple[Prediction, Held]:
        """Predict a token's experts, and give the next state; the given state stays as it is.

        Raises:
            SettingError: if the inputs do not have the spec's shape.
        """
        assert isinstance(state, dict)
        ids = np.asarray(step.token_ids, dtype=np.int64)
        previous = np.asarray(step.previous, dtype=np.float32)
        if ids.ndim != 1 or previous.shape != (len(ids), *self.spec.shape):
            raise SettingError(
                f"A step takes ids [B] and previous [B, {self.spec.shape[0]}, {self.spec.shape[1]}]; got "
                f"{list(ids.shape)} and {list(previous.shape)}."
            )
        found = self._session.run(step_feeds(ids, previous, arrays_of(state)))
        heads, after = found[: len(found) - len(state)], found[len(found) - len(state) :]
        pairs = zip(state.items(), after, strict=True)
        return Prediction(*heads), {
            name: before.append(value) if isinstance(before, Ring) else value for (name, before), value in pairs
        }


class OnnxLayerPredictor(OnnxTokenPredictor):
    """Predict a token's layers ahead from the true experts of its layers so far; satisfies `LayerPredictor`."""

    def __init__(
        self,
        spec: PredictorSpec,
        session: Session,
        start: State,
        rings: Collection[str],
        ahead: Session,
        reach: int,
    ) -> None:
        super().__init__(spec, session, start, rings)
        self.reach, self._ahead = reach, ahead
        wanted = {entry["name"] for entry in ahead.signature()["inputs"]}
        self._context = [name for name in start if f"state.{name}" in wanted]

    def ahead(self, layer: int, used: np.ndarray, state: object) -> np.ndarray:
        """Give float32 probabilities [B, L, E] of rows layer + 1 .. layer + reach, 0 elsewhere.

        Raises:
            SettingError: if the layer is none of the spec's, or `used` does not have its shape.
        """
        assert isinstance(state, dict)
        used = np.asarray(used, dtype=np.float32)
        rows = self.spec.shape[0]
        if not -1 <= layer < rows or used.shape[1:] != self.spec.shape:
            raise SettingError(
                f"A layer is one of -1..{rows - 1} and its used experts are [B, {rows}, {self.spec.shape[1]}]; got "
                f"{layer} and {list(used.shape)}."
            )
        context = named(arrays_of({name: state[name] for name in self._context}))
        (probabilities,) = self._ahead.run({"layer": np.array(layer, np.int64), "used": used, **context})
        return probabilities


class OnnxBatchPredictor:
    """Predict all MoE layers of all tokens of a batch; satisfies `BatchPredictor`."""

    def __init__(self, spec: PredictorSpec, session: Session) -> None:
        self.spec, self._session = spec, session

    def predict(self, token_ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
        """Give float32 probabilities [B, T, L, E].

        Raises:
            SettingError: if ids and mask do not have one shape [B, T].
        """
        ids, mask = np.asarray(token_ids, dtype=np.int64), np.asarray(mask, dtype=bool)
        if ids.ndim != 2 or ids.shape != mask.shape:
            raise SettingError(f"A batch takes ids and mask of one shape [B, T]; got {ids.shape} and {mask.shape}.")
        (probabilities,) = self._session.run({"token_ids": ids, "mask": mask})
        return probabilities
