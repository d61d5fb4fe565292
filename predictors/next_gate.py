"""Mixtral-offloading's predictor: gates of the next layers, applied to the hidden state that this layer's router saw.

A layer changes the hidden state little, so the gate of layer l + n mostly chooses what it will choose when its turn
comes. Nothing is learned: the gates are the model's own, and the hidden states come from whoever runs the model, or
from a trace that was recorded with them. What decides are the scores that the family's top-k chooses from: its logits,
through its scoring function and with its correction where it has one, closed groups left out.

    predictor = NextGate.of_model(model, reach=2)
    _, state = predictor.step(step, predictor.start(1))
    predictor.ahead(layer, used, state, hidden)         # hidden [B, H], the input of layer's router
"""

# B batch, L MoE layers, E experts, H hidden, G groups

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from ..collect.errors import SettingError
from ..collect.topology import Stack
from .base import Prediction, PredictorSpec, Step

if TYPE_CHECKING:
    from ..collect.gates import Gate

FAMILY = "next_gate"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class GateWeights:
    """Hold one layer's gate as arrays."""

    weight: np.ndarray
    """float32 [E, H], the factor of the logits included."""
    bias: np.ndarray | None = None
    """float32 [E], added to the logits."""
    correction: np.ndarray | None = None
    """float32 [E], added to the scores."""
    scoring: str = "softmax"
    """From logits to scores, where a correction is added: none, softmax, sigmoid or sqrtsoftplus."""
    num_groups: int = 1
    """Groups of experts, of which only the best are open to a token."""
    open_groups: int = 1
    """Groups that are open."""

    @classmethod
    def of_gate(cls, gate: Gate) -> GateWeights:
        """Copy a gate's tensors."""

        def copied(tensor: Any) -> np.ndarray | None:
            return None if tensor is None else tensor.detach().float().cpu().numpy().copy()

        weight, bias = copied(gate.weight), copied(gate.bias)
        assert weight is not None
        return cls(
            weight=weight * np.float32(gate.scale),
            bias=None if bias is None else bias * np.float32(gate.scale),
            correction=copied(gate.correction),
            scoring=gate.scoring,
            num_groups=gate.num_groups,
            open_groups=gate.open_groups,
        )

    def scores(self, hidden_BH: np.ndarray) -> np.ndarray:
        """Give what the layer's top-k would choose from, float32 [B, E]; -inf in closed groups."""
        scores_BE = hidden_BH @ self.weight.T + (0 if self.bias is None else self.bias)
        if self.correction is not None:
            scores_BE = _scored(scores_BE, self.scoring) + self.correction
        if self.num_groups == 1:
            return scores_BE
        groups_BGE = scores_BE.reshape(len(scores_BE), self.num_groups, -1)
        best = 1 if self.correction is None else 2  # DeepSeek-V2 ranks groups by their best expert, V3 by the best two
        totals_BG = np.sort(groups_BGE, axis=-1)[..., -best:].sum(-1)
        opened_BG = totals_BG >= np.sort(totals_BG, axis=-1)[:, -self.open_groups, None]
        return np.where(opened_BG[..., None], groups_BGE, -np.inf).reshape(scores_BE.shape)


class NextGate:
    """Predict layers ahead by their own gates; a `LayerPredictor` whose `ahead` also takes the hidden state.

    Args:
        spec: what is predicted.
        gates: one for each layer of the spec's stack.
        reach: layers ahead that are predicted.

    Raises:
        SettingError: if there are not as many gates as layers, or the reach is below 1.
    """

    needs_hidden: ClassVar[bool] = True
    """Whoever runs it must give `ahead` the hidden state."""

    def __init__(self, spec: PredictorSpec, gates: list[GateWeights], *, reach: int = 1) -> None:
        if len(gates) != spec.shape[0]:
            raise SettingError(f"next_gate takes one gate for each of {spec.shape[0]} layers, got {len(gates)}.")
        if reach < 1:
            raise SettingError(f"reach must be at least 1, got {reach}.")
        self.spec, self.gates, self.reach = spec, gates, reach
        self.hidden_size = gates[0].weight.shape[1]
        self._layers = [spec.topology.layers[index] for index in spec.layers]

    @classmethod
    def of_model(cls, model: Any, *, stack: Stack | None = None, reach: int = 1) -> NextGate:
        """Take the gates of a transformers model, resident or offloaded: routers stay where they are.

        Args:
            model: a mixture-of-experts model.
            stack: whose layers are predicted; the model's first one where not given.
            reach: layers ahead that are predicted.

        Raises:
            ModelError: if it has no MoE layers, or a router that is more than a matrix.
        """
        from ..collect.anatomy import text_model  # torch only here
        from ..collect.architectures import find_moe_modules, topology_of
        from ..collect.gates import find_gates

        topology = topology_of(model)
        stack = stack or topology.stacks[0]
        modules = find_moe_modules(model)
        vocab_size = int(text_model(model).get_input_embeddings().num_embeddings)
        spec = PredictorSpec(family=FAMILY, horizon="layer", topology=topology, stack=stack, vocab_size=vocab_size)
        gates = find_gates(model, [modules[index] for index in spec.layers])
        return cls(spec, [GateWeights.of_gate(gate) for gate in gates], reach=reach)

    def start(self, batch: int) -> object:
        """Give the empty state."""
        return None

    def step(self, step: Step, state: object) -> tuple[Prediction, object]:
        """Give every expert of a layer the same: before the first layer nothing is known of a token."""
        even = np.zeros(self.spec.shape, dtype=np.float32)
        for row, layer in enumerate(self._layers):
            even[row, : layer.num_experts] = layer.top_k / layer.num_experts
        return Prediction(np.repeat(even[None], len(step.token_ids), axis=0)), state

    def ahead(self, layer: int, used: np.ndarray, state: object, hidden: np.ndarray | None = None) -> np.ndarray:
        """Give float32 [B, L, E], 0 except in rows layer + 1 .. layer + reach, by the gates of these rows.

        In each row the top-k experts with the largest scores, and no others, have more than .5; the further a score is
        from theirs, in standard deviations, the nearer to 0 or 1. Before the first layer all experts of a row are even.

        Args:
            layer: the row whose router saw `hidden`; -1 before the first.
            used: float32 [B, L, E], which is not looked at but for the size of the batch.
            state: what the token's own `step` gave.
            hidden: float32 [B, H], the input of the router of row `layer`.

        Raises:
            SettingError: if the hidden state is missing or of another shape.
        """
        out = np.zeros((len(used), *self.spec.shape), dtype=np.float32)
        rows = range(layer + 1, min(layer + 1 + self.reach, len(self.gates)))
        if layer < 0:
            even, _ = self.step(Step(np.zeros(len(used), np.int64), used), state)
            out[:, rows] = even.routing[:, rows]
            return out
        if hidden is None or hidden.shape != (len(used), self.hidden_size):
            given = "none" if hidden is None else list(hidden.shape)
            raise SettingError(
                f"next_gate foresees layers from the hidden state [{len(used)}, {self.hidden_size}] that the router of "
                f"MoE layer {layer} saw, got {given}; run it beside the model, or on a trace recorded with --hidden."
            )
        for row in rows:
            scores_BE = self.gates[row].scores(np.asarray(hidden, dtype=np.float32))
            out[:, row, : scores_BE.shape[1]] = _around_top_k(scores_BE, self._layers[row].top_k)
        return out

    def sequence(self, token_ids: np.ndarray, used: np.ndarray) -> np.ndarray:
        """Give what `step` says of a recorded sequence's tokens, [T, L, E]."""
        return self.step(Step(token_ids, used), None)[0].routing

    def sequence_ahead(self, used: np.ndarray, hidden: np.ndarray, stride: int = 1) -> np.ndarray:
        """Give float32 [T, L, E] whose row l is what `ahead` says of it from row l - stride; 0 in the first rows.

        Args:
            used: float32 [T, L, E], of a recorded sequence; not looked at but for its shape.
            hidden: [T, L, H], what its routers saw.
            stride: layers ahead, at most the reach.
        """
        out = np.zeros(used.shape, dtype=np.float32)
        for row in range(stride, len(self.gates)):
            scores_TE = self.gates[row].scores(hidden[:, row - stride].astype(np.float32))
            out[:, row, : scores_TE.shape[1]] = _around_top_k(scores_TE, self._layers[row].top_k)
        return out

    def agreement(self, hidden_TLH: np.ndarray, experts_TLK: np.ndarray) -> np.ndarray:
        """Give the share of the true experts that each layer's gate chooses from its own hidden states, [L].

        Anything far below 1 means that the model's routers do more than is known of them here.
        """
        shares = []
        for row, (gate, layer) in enumerate(zip(self.gates, self._layers, strict=True)):
            scores_TE = gate.scores(hidden_TLH[:, row].astype(np.float32))
            chosen_TK = np.argsort(-scores_TE, axis=1, kind="stable")[:, : layer.top_k]
            true_TK = experts_TLK[:, row, : layer.top_k]
            hits = (chosen_TK[:, :, None] == true_TK[:, None, :]).any(1)
            shares.append(hits[true_TK >= 0].mean() if (true_TK >= 0).any() else 1.0)
        return np.array(shares)


def _scored(logits_BE: np.ndarray, scoring: str) -> np.ndarray:
    if scoring == "none":
        return logits_BE
    if scoring == "sigmoid":
        return 1 / (1 + np.exp(-logits_BE))
    if scoring == "sqrtsoftplus":
        return np.sqrt(np.logaddexp(0, logits_BE))
    raised = np.exp(logits_BE - logits_BE.max(-1, keepdims=True))
    return raised / raised.sum(-1, keepdims=True)


def _around_top_k(scores_BE: np.ndarray, top_k: int) -> np.ndarray:
    """Map scores to (0, 1), in their order, so that the k largest of each row lie above .5; -inf becomes 0."""
    num_experts = scores_BE.shape[1]
    if top_k == num_experts:
        return np.ones_like(scores_BE)
    ordered_BE = -np.sort(-scores_BE, axis=-1)
    last_B1, next_B1 = ordered_BE[:, top_k - 1, None], ordered_BE[:, top_k, None]
    middle_B1 = np.where(np.isfinite(next_B1), (last_B1 + next_B1) / 2, last_B1 - 1)
    finite = np.isfinite(scores_BE)
    mean_B1 = np.where(finite, scores_BE, 0).sum(-1, keepdims=True) / finite.sum(-1, keepdims=True)
    spread_B1 = np.sqrt(
        (np.where(finite, scores_BE - mean_B1, 0) ** 2).sum(-1, keepdims=True) / finite.sum(-1, keepdims=True)
    )
    return 1 / (1 + np.exp(np.minimum(-(scores_BE - middle_B1) / np.maximum(spread_B1, 1e-9), 80)))
