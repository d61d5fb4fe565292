"""The contract of every predictor of experts. Knows arrays and horizons; knows nothing of caches, models or threads.

Horizons:
  batch   all tokens known before the batch starts: probabilities [B, T, L, E] from one call;
  token   all MoE layers of token t, from ids <= t and routing < t: [B, L, E] from one step with explicit state;
  layer   MoE layers l+1.. of token t, also from the true experts of its layers <= l: a step, then a call per layer.
L counts MoE layers of the stacks that the predictor serves, E is the largest number of experts of a layer; entries
beyond a layer's own size are 0. Token ids outside the vocabulary map to one unknown row. Probabilities are of "this
token uses this expert" (they sum to about top-k over a layer), not of a softmax.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, get_args, runtime_checkable

import numpy as np

from ..collect.errors import SettingError
from ..collect.topology import MoeTopology, Stack

Horizon = Literal["batch", "token", "layer"]

# B batch, T tokens, L MoE layers served, E experts of the largest layer


class Step(NamedTuple):
    """One step's input of the token horizon."""

    token_ids: np.ndarray
    """int64 [B]: id of the token whose experts are wanted."""
    previous: np.ndarray
    """float32 [B, L, E]: 1 where the previous token used the expert (0 everywhere before the first)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PredictorSpec:
    """Say what a predictor predicts, and for which model."""

    family: str
    """Registered name, as `sru_attention`."""
    horizon: Horizon
    """How far ahead it predicts."""
    topology: MoeTopology
    """MoE layers of the whole model."""
    stack: Stack
    """The stack whose layers it serves."""
    vocab_size: int
    """Token ids from here on map to the unknown row."""

    @property
    def layers(self) -> list[int]:
        """MoE-layer indices that rows of the output stand for."""
        return self.topology.layers_of(self.stack)

    @property
    def shape(self) -> tuple[int, int]:
        """(L, E) of the output."""
        return len(self.layers), max(self.topology.layers[i].num_experts for i in self.layers)

    def to_json(self) -> dict[str, Any]:
        """Give the spec as plain JSON values."""
        return {
            "family": self.family,
            "horizon": self.horizon,
            "stack": self.stack,
            "vocab_size": self.vocab_size,
            "topology": self.topology.to_json(),
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> PredictorSpec:
        """Read what `to_json` gave; other keys are ignored.

        Raises:
            KeyError: if a key is missing.
            SettingError: if the topology, the horizon or the vocabulary's size is none.
        """
        if value["horizon"] not in get_args(Horizon):
            legal = ", ".join(get_args(Horizon))
            raise SettingError(f"A predictor's horizon must be one of {legal}, got {value['horizon']!r}.")
        vocab_size = value["vocab_size"]
        if not isinstance(vocab_size, int) or isinstance(vocab_size, bool) or vocab_size < 0:
            raise SettingError(f"vocab_size must be a number of token ids, got {vocab_size!r}.")
        names = ("family", "horizon", "stack", "vocab_size")
        return cls(topology=MoeTopology.from_json(value["topology"]), **{name: value[name] for name in names})


class Prediction(NamedTuple):
    """What one step says."""

    routing: np.ndarray
    """float32 [B, L, E]: probability that this token uses the expert."""
    reuse: np.ndarray | None = None
    """float32 [B, L, E], None without a reuse head: how much the tokens after this one will use the expert, sooner use
    counting more; whoever has the smallest leaves the cache first. Over a layer it sums to about top-k."""


@runtime_checkable
class TokenPredictor(Protocol):
    """Predict all MoE layers of the next token, one step at a time."""

    spec: PredictorSpec

    def start(self, batch: int) -> object:
        """Give the state before the first token of `batch` sequences."""
        ...

    def step(self, step: Step, state: object) -> tuple[Prediction, object]:
        """Predict `step.token_ids` and give the next state; the given one stays as it is."""
        ...


@runtime_checkable
class LayerPredictor(TokenPredictor, Protocol):
    """Predict the MoE layers ahead in the token of the last step, layer by layer as its true experts become known."""

    reach: int
    """Layers ahead that it predicts, at least 1; rows farther ahead are 0."""

    def ahead(self, layer: int, used: np.ndarray, state: object) -> np.ndarray:
        """Give float32 probabilities [B, L, E], 0 except in rows layer + 1 .. layer + reach.

        Args:
            layer: the last row whose true experts are known; -1 before the first.
            used: float32 [B, L, E]: 1 where a row up to `layer` used the expert; later rows are not looked at.
            state: what the token's own `step` gave.
        """
        ...


@runtime_checkable
class BatchPredictor(Protocol):
    """Predict all MoE layers of all tokens of a batch at once."""

    spec: PredictorSpec

    def predict(self, token_ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
        """Give float32 probabilities [B, T, L, E] for int64 ids [B, T]; mask bool [B, T] is False on padding."""
        ...


Predictor = TokenPredictor | BatchPredictor  # a LayerPredictor is a TokenPredictor whose spec has the horizon `layer`
