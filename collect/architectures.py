"""Finding the MoE layers of a transformers model by structure. Knows modules; knows nothing of traces or stores.

What an experts module looks like is up to its kind (`kinds`): fused for those behind transformers' experts interface,
others for the families outside of it. All stay recognisable after their parameters were moved into a store.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .errors import ModelError
from .kinds import kind_named, kind_of
from .topology import STACKS, MoeLayer, MoeTopology, Stack

INFLATED = "foregate_inflated"  # in a config: {width setting: times that it was multiplied}


@dataclass(frozen=True, kw_only=True, slots=True)
class MoeModule:
    """Point at one MoE layer of a model."""

    name: str
    """Path of the experts module, as model.layers.0.mlp.experts."""
    kind: str
    """How its experts are laid out and called: a key of `kinds.KINDS`."""
    layer: MoeLayer
    """Its place, size and top-k."""


def find_moe_modules(model: nn.Module) -> list[MoeModule]:
    """List the MoE layers of a model, encoder before decoder, in block order.

    Raises:
        ModelError: if no routed experts are found; the message names what was found instead.
    """
    config = getattr(model, "config", None)
    paired = bool(getattr(config, "is_encoder_decoder", False))
    found = []
    for name, module in model.named_modules():
        name_of_kind = kind_of(module)
        if name_of_kind is None:
            continue
        kind = kind_named(name_of_kind)
        parent = model.get_submodule(name.rpartition(".")[0])
        stack: Stack = "causal"
        if paired:
            stack = "decoder" if "decoder" in name.split(".") else "encoder"
        num_experts = kind.num_experts(module)
        top_k = kind.top_k(module) or _top_k(parent, config, num_experts)
        layer = MoeLayer(stack=stack, block=_block(name), num_experts=num_experts, top_k=top_k)
        found.append(MoeModule(name=name, kind=kind.name, layer=layer))
    if not found:
        kinds = sorted({type(module).__name__ for module in model.modules() if "MLP" in type(module).__name__})
        raise ModelError(
            f"{type(model).__name__} has no MoE layers that foregate knows (its feed-forward modules: "
            f"{', '.join(kinds) or 'none'}); give a mixture-of-experts model such as Qwen3-MoE, Mixtral or Switch."
        )
    return sorted(found, key=lambda item: STACKS.index(item.layer.stack))  # stable: block order inside a stack


def expert_tensors(module: nn.Module, kind: str, expert: int) -> dict[str, torch.Tensor]:
    """Give one expert's weights by name, as views: the parts that make up its block, in the order of the block."""
    form = kind_named(kind)
    return form.expert(form.stored(module), expert, form.num_experts(module))


def topology_of(model: nn.Module) -> MoeTopology:
    """Give the topology of a whole model with its byte sizes.

    Raises:
        ModelError: if the model has no MoE layers.
    """
    modules = find_moe_modules(model)
    first = modules[0]
    experts = model.get_submodule(first.name)
    expert_bytes = getattr(experts, "expert_bytes", None)  # left behind by a store that took the parameters away
    if expert_bytes is None:
        blocks = expert_tensors(experts, first.kind, 0)
        expert_bytes = sum(tensor.numel() * tensor.element_size() for tensor in blocks.values()) or None
    routed = {
        f"{item.name}.{name}"
        for item in modules
        for name in kind_named(item.kind).stored(model.get_submodule(item.name))
    }
    embeddings = {id(parameter) for item in _embeddings(model) for parameter in item.parameters()}
    dense = sum(
        parameter.numel() * parameter.element_size()
        for name, parameter in model.named_parameters()
        if name not in routed and id(parameter) not in embeddings
    )
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if head is not None and any(id(parameter) in embeddings for parameter in head.parameters()):
        dense += sum(parameter.numel() * parameter.element_size() for parameter in head.parameters())
    hidden = getattr(_text_config(model.config), "hidden_size", None)
    return MoeTopology(
        layers=tuple(item.layer for item in modules), hidden_size=hidden, expert_bytes=expert_bytes, dense_bytes=dense
    )


# what a config says beside the model itself: paths, versions, dtype, where the weights lie
NOT_THE_MODEL = {
    "_name_or_path",
    "transformers_version",
    "dtype",
    "torch_dtype",
    "quantization_config",
    "architectures",
}


def model_fingerprint(config: Any) -> str:
    """Hash a model's config, without what does not change the model: paths, versions, dtype, run-time choices.

    Widened experts compute what the narrow ones did, so an inflated model has the fingerprint of its original.
    """
    text = json.dumps(_essence(config.to_dict()), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _essence(value: dict[str, Any]) -> dict[str, Any]:
    """Take inflation and what is not the model out of a config and its sub-configs, which have dtypes of their own."""
    plain = {name: _essence(item) if isinstance(item, dict) else item for name, item in value.items()}
    for setting, factor in plain.pop(INFLATED, {}).items():
        plain[setting] //= factor
    return {name: item for name, item in plain.items() if name not in NOT_THE_MODEL}


def _block(name: str) -> int:
    numbers = re.findall(r"\.(\d+)\.", f".{name}.")
    return int(numbers[0]) if numbers else 0


def _top_k(parent: nn.Module, config: Any, num_experts: int) -> int:
    """Find k at the router beside the experts; a config's value may differ from what its router does."""
    for module in parent.modules():
        for name in ("top_k", "num_experts_per_tok", "moe_top_k"):
            value = getattr(module, name, None)
            if isinstance(value, int) and 1 <= value <= num_experts:
                return value
    for name in ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k"):
        value = getattr(_text_config(config), name, None)
        if isinstance(value, int) and 1 <= value <= num_experts:
            return value
    raise ModelError(
        f"{type(parent).__name__} has {num_experts} experts but no top_k on its router or in the config; "
        "this family cannot be recorded."
    )


def _text_config(config: Any) -> Any:
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def _embeddings(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, nn.Embedding) and module.num_embeddings > 256]
