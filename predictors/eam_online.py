"""MoE-Infinity's predictor that goes on learning: each finished request enters the collection, in place of its like.

Needs NumPy alone; `of_bundle` takes over the collection of an exported `eam`, and until something is learned both say
the same. A full collection gives up the matrix that is most similar to the new one, so that it stays diverse.

    predictor = OnlineEam.of_bundle("eam-bundle")
    state = predictor.start(1)
    ...                                                # step and ahead, token by token
    predictor.learn(activation_matrix(row, topology, num_experts))

Threads: `learn` puts new arrays in place of the old ones, which are never written to, so that other threads may predict
meanwhile; one thread learns.
"""

# B batch, L MoE layers, E experts, R matrices of the collection

from __future__ import annotations

from pathlib import Path

import numpy as np

from ..collect.errors import BundleError, SettingError
from .activation_matrices import LEAST, cosines, row_shares
from .base import Prediction, PredictorSpec, Step
from .bundle import Bundle

State = dict[str, np.ndarray]
FAMILY = "eam"


class OnlineEam:
    """Predict layers ahead by requests that were alike; satisfies `LayerPredictor`, and learns.

    Args:
        spec: what is predicted.
        matrices: float32 [R, L, E], activation matrices of past requests, at least one; counts or shares.
        popularity: float32 [L, E], what is said before a request's first token.
        capacity: matrices that are kept at most.
        temperature: difference of cosines at which a matrix counts e times as much as another.
        decay: factor per token by which past uses count less.
        reach: layers ahead that are predicted.

    Raises:
        SettingError: if there is no matrix, or more than the capacity.
    """

    def __init__(
        self,
        spec: PredictorSpec,
        matrices: np.ndarray,
        popularity: np.ndarray,
        *,
        capacity: int = 120,
        temperature: float = 0.01,
        decay: float = 1.0,
        reach: int = 4,
    ) -> None:
        if not 1 <= len(matrices) <= capacity:
            raise SettingError(f"A collection of capacity {capacity} takes 1 to as many matrices, got {len(matrices)}.")
        self.spec, self.capacity, self.reach = spec, capacity, reach
        self.collection = row_shares(np.asarray(matrices, dtype=np.float32))
        self._popularity, self._temperature, self._decay = popularity, temperature, decay
        layers = [spec.topology.layers[index] for index in spec.layers]
        self._top_k = np.array([layer.top_k for layer in layers], dtype=np.float32)
        self._exists = np.arange(spec.shape[1]) < np.array([layer.num_experts for layer in layers])[:, None]

    @classmethod
    def of_bundle(cls, path: str | Path | Bundle) -> OnlineEam:
        """Take over the collection and the settings of an exported `eam`.

        Raises:
            BundleError: if the bundle cannot be read, or is of another family.
        """
        bundle = path if isinstance(path, Bundle) else Bundle.open(path)
        if bundle.spec.family != FAMILY:
            raise BundleError(
                f"{bundle.path} holds a predictor of family {bundle.spec.family!r}; give one of {FAMILY!r}."
            )
        matrices = bundle.tensor("network.collection_CLE")[bundle.tensor("network.present_C")]
        settings = {name: bundle.card["settings"][name] for name in ("capacity", "temperature", "decay", "reach")}
        return cls(bundle.spec, matrices, bundle.tensor("network.popularity_LE"), **settings)

    def learn(self, matrix: np.ndarray) -> int | None:
        """Put a finished request's activation matrix [L, E] into the collection; give the place of what it replaced.

        Raises:
            SettingError: if it does not have the spec's shape, or has no use at all.
        """
        if matrix.shape != self.spec.shape or not matrix.any():
            raise SettingError(
                f"An activation matrix has the shape {list(self.spec.shape)} and at least one use; got "
                f"{list(matrix.shape)} with {int(matrix.sum())} uses."
            )
        shares = row_shares(matrix.astype(np.float32))
        if len(self.collection) < self.capacity:
            self.collection = np.concatenate([self.collection, shares[None]])
            return None
        place = int(cosines(shares, self.collection).argmax())
        collection = self.collection.copy()
        collection[place] = shares
        self.collection = collection
        return place

    def start(self, batch: int) -> State:
        """Give the state before the first token of `batch` sequences: no uses."""
        return {"counts": np.zeros((batch, *self.spec.shape), dtype=np.float32)}

    def step(self, step: Step, state: object) -> tuple[Prediction, State]:
        """Predict a token by the tokens before it, and give the next state; the given state stays as it is."""
        assert isinstance(state, dict)
        counts = self._decay * state["counts"] + step.previous
        return Prediction(self._matched(counts)), {"counts": counts}

    def ahead(self, layer: int, used: np.ndarray, state: object) -> np.ndarray:
        """Give float32 probabilities [B, L, E] of rows layer + 1 .. layer + reach, 0 elsewhere."""
        assert isinstance(state, dict)
        rows = np.arange(self.spec.shape[0])[:, None]
        found = self._matched(self._decay * state["counts"] + used * (rows <= layer))
        return found * ((rows > layer) & (rows <= layer + self.reach))

    def _matched(self, counts: np.ndarray) -> np.ndarray:
        return np.stack([self._matched_one(row_shares(matrix)) for matrix in counts]).astype(np.float32)

    def _matched_one(self, shares: np.ndarray) -> np.ndarray:
        """Give probabilities [L, E] for one request's shares [L, E]."""
        if not shares.any():
            return self._popularity * self._exists
        collection = self.collection
        cosine = cosines(shares, collection)
        nearness = np.exp((cosine - cosine.max()) / self._temperature)
        matched = np.tensordot(nearness / nearness.sum(), collection, 1) * self._top_k[:, None]
        return np.clip(matched, LEAST, 1 - LEAST) * self._exists
