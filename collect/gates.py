"""Finding each MoE layer's gate: the matrix that a router multiplies a hidden state with, and what follows until top-k.

Found by structure, beside the experts or inside of them, as `architectures` finds the experts. Knows modules; knows no
traces. A router that is more than a matrix (its own layers, a table of ids) is refused where its matrix is not found;
`predictors.next_gate` holds what is found to recorded routing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

import torch
from torch import nn

from .architectures import MoeModule
from .errors import ModelError

Scoring = Literal["none", "softmax", "sigmoid", "sqrtsoftplus"]
CORRECTIONS = ("e_score_correction_bias", "expert_bias")
NAMED = ("router", "gate", "wg", "classifier")  # parts of a gate's path
SCORING_OF: dict[str, Scoring] = {"Kolibri1TopKRouter": "none"}
"""Routers whose scores are not what their config or their correction suggests, by class name."""
TABLES = {"DeepseekV4HashRouter"}
"""Routers with a gate whose experts come from elsewhere all the same, by class name."""
FOREIGN = ("shared", "per_layer", "expert_gate", "self_attn", "self_attention")  # parts of paths that only look like it

# E experts, H hidden


@dataclass(frozen=True, kw_only=True, slots=True)
class Gate:
    """Describe one MoE layer's gate; weights are the model's own tensors."""

    name: str
    """Path of the module whose input is the hidden state."""
    weight: torch.Tensor
    """[E, H]."""
    bias: torch.Tensor | None
    """[E], added to the logits."""
    correction: torch.Tensor | None
    """[E], added to the scores that choose, and to nothing else."""
    scale: float
    """Factor of the logits."""
    scoring: Scoring
    """From logits to scores; without a correction any of them keeps the order."""
    num_groups: int
    """Groups of experts, of which only the best are open to a token; 1 for no groups."""
    open_groups: int
    """Groups that are open."""


def find_gates(model: nn.Module, modules: list[MoeModule]) -> list[Gate]:
    """Find the gate of each MoE layer.

    Raises:
        ModelError: if a layer has none that is one matrix, or several that could be it.
    """
    return [_gate(model, item) for item in modules]


def _gate(model: nn.Module, item: MoeModule) -> Gate:
    parent_name = item.name.rpartition(".")[0]
    parent, experts = model.get_submodule(parent_name), model.get_submodule(item.name)
    found = dict(_candidates(experts, item.name, item.layer.num_experts))
    found = found or dict(_candidates(parent, parent_name, item.layer.num_experts))
    if len(found) > 1:  # router.gate, or a gate of something else beside the router
        found = {name: module for name, module in found.items() if "router" in name} or found
    found = {name: module for name, module in found.items() if type(module).__name__ not in TABLES}
    if len(found) != 1:
        what = "several matrices that could be its gate" if found else "no gate that is one matrix and decides"
        raise ModelError(
            f"The MoE layer at {item.name} has {what} ({', '.join(found) or type(parent).__name__}), so that it cannot "
            "be foreseen from hidden states; use a predictor that learns from routing, as mlp."
        )
    ((name, module),) = found.items()
    weight, bias = cast(Any, module).weight, getattr(module, "bias", None)
    beside = [module, model.get_submodule(name.rpartition(".")[0]), parent, experts]
    correction = _correction(beside, len(weight))
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    greedy = any(getattr(holder, "topk_method", None) == "greedy" for holder in beside)
    num_groups = 1 if greedy else _number(beside, config, ("num_group", "n_group"))
    return Gate(
        name=name,
        weight=weight,
        bias=bias if isinstance(bias, torch.Tensor) and bias.shape == weight.shape[:1] else None,
        correction=correction,
        scale=float(getattr(module, "output_multiplier", 1.0)),
        scoring=_scoring(config, beside),
        num_groups=num_groups,
        open_groups=min(num_groups, _number(beside, config, ("topk_group",))),
    )


def _candidates(root: nn.Module, prefix: str, num_experts: int) -> Iterator[tuple[str, nn.Module]]:
    for inner, module in root.named_modules():
        weight = getattr(module, "weight", None)
        parts = inner.split(".")
        legal = any(word in part for part in parts for word in NAMED) and not any(word in inner for word in FOREIGN)
        if not legal or any(part.isdigit() for part in parts):  # inside of one expert
            continue
        if isinstance(weight, torch.Tensor) and weight.ndim == 2 and len(weight) == num_experts:
            yield f"{prefix}.{inner}", module


def _correction(modules: list[nn.Module], num_experts: int) -> torch.Tensor | None:
    for root in modules:
        for name, tensor in [*root.named_parameters(), *root.named_buffers()]:
            if name.rpartition(".")[2] in CORRECTIONS and tensor.numel() == num_experts:
                return tensor.reshape(-1)
    return None


def _scoring(config: Any, modules: list[nn.Module]) -> Scoring:
    own = SCORING_OF.get(type(modules[0]).__name__)
    if own is not None:
        return own
    for setting in ("scoring_func", "score_function", "score_func", "moe_router_activation_func"):
        value = getattr(config, setting, None)
        if value in get_args(Scoring):
            return cast(Scoring, value)
    averaged = any(hasattr(module, "moe_statics") for module in modules)  # Ernie corrects softmax scores
    return "softmax" if averaged else "sigmoid"


def _number(modules: list[nn.Module], config: Any, names: tuple[str, ...]) -> int:
    for holder in (*modules, config):
        for name in names:
            value = getattr(holder, name, None)
            if isinstance(value, int) and value >= 1:
                return value
    return 1
