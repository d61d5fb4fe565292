"""Finding the MoE layers of a transformers model by structure. Knows modules; knows nothing of traces or stores.

What an experts module looks like is up to its kind (`kinds`): fused for those behind transformers' experts interface,
others for the families outside of it. All stay recognisable after their parameters were moved into a store.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from .anatomy import describe_parts, passes_of, reads_text
from .errors import ModelError
from .kinds import kind_named, kind_of
from .topology import STACKS, MoeLayer, MoeTopology, Stack

INFLATED = "foregate_inflated"  # in a config: {width setting: times that it was multiplied}


ROUTER_TOP_K = {"PhimoeTopKRouter": 2}
"""Routers whose k is not what they say: class name -> k."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MoeModule:
    """Point at one MoE layer of a model: one call of one experts module in each forward."""

    name: str
    """Path of the experts module, as model.layers.0.mlp.experts."""
    kind: str
    """How its experts are laid out and called: a key of `kinds.KINDS`."""
    layer: MoeLayer
    """Its place, size and top-k."""
    call: int = 0
    """Which call of the module in a forward this is; above 0 in a looped block only."""
    num_calls: int = 1
    """Calls of the module in a forward, each a MoE layer of its own."""
    home: int
    """MoE layer that its experts belong to: its own index, or an earlier one that has the same parameters."""


def find_moe_modules(model: nn.Module) -> list[MoeModule]:
    """List the MoE layers that text passes, encoder before decoder, in the order in which a forward calls them.

    Raises:
        ModelError: if no routed experts are found; the message names what was found instead.
    """
    config = _text_config(getattr(model, "config", None))
    named = [(name, module, kind) for name, module in model.named_modules() if (kind := kind_of(module)) is not None]
    inside = [item for item in named if reads_text(item[0])]
    if not inside:
        raise ModelError(_unknown(model, [name for name, *_ in named]))
    paired = {"encoder", "decoder"} <= {part for name, *_ in inside for part in name.split(".")}
    paired = paired or bool(getattr(config, "is_encoder_decoder", False))
    found: list[MoeModule] = []
    for name, module, kind_name in inside:
        kind, block = kind_named(kind_name), _block(name)
        stack: Stack = "causal"
        if paired:
            stack = "decoder" if "decoder" in name.split(".") else "encoder"
        num_experts = kind.num_experts(module)
        top_k = kind.top_k(module) or _top_k(model.get_submodule(name.rpartition(".")[0]), config, num_experts)
        layer = MoeLayer(stack=stack, block=block, num_experts=num_experts, top_k=top_k)
        num_calls = passes_of(config, block)
        for call in range(num_calls):
            item = MoeModule(name=name, kind=kind_name, layer=layer, call=call, num_calls=num_calls, home=-1)
            found.append(item)
    return _with_homes(model, _in_order(found))


def left_as_they_are(model: nn.Module) -> list[str]:
    """List the experts modules that text does not pass: they are neither recorded nor offloaded."""
    return [name for name, module in model.named_modules() if kind_of(module) is not None and not reads_text(name)]


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


def _in_order(found: list[MoeModule]) -> list[MoeModule]:
    """Put layers in the order of their calls: a loop runs all its blocks before its next pass."""
    looped = [index for index, item in enumerate(found) if item.num_calls > 1]
    if looped:
        first, last = looped[0], looped[-1] + 1
        found = [*found[:first], *sorted(found[first:last], key=lambda item: item.call), *found[last:]]
    return sorted(found, key=lambda item: STACKS.index(item.layer.stack))  # stable: block order inside a stack


def _with_homes(model: nn.Module, found: list[MoeModule]) -> list[MoeModule]:
    """Note which layers share their parameters: tied modules, and the calls of a loop."""
    homes: dict[Any, int] = {}
    items = []
    for index, item in enumerate(found):
        stored = kind_named(item.kind).stored(model.get_submodule(item.name))
        key = tuple(map(id, stored.values())) or item.name  # by name where a store took the parameters away
        items.append(replace(item, home=homes.setdefault(key, index)))
    return items


def _unknown(model: nn.Module, outside: list[str]) -> str:
    where = f", only in parts that text does not pass ({', '.join(outside[:3])})" if outside else ""
    return (
        f"{type(model).__name__} has no MoE layers that foregate knows{where} ({describe_parts(model)}); give a "
        "mixture-of-experts model such as Qwen3-MoE, Mixtral or Switch, or register its kind of experts "
        "(README, Adding an architecture)."
    )


def _top_k(parent: nn.Module, config: Any, num_experts: int) -> int:
    """Find k at the router beside the experts; a config's value may differ from what its router does."""
    for module in parent.modules():
        if type(module).__name__ in ROUTER_TOP_K:
            return ROUTER_TOP_K[type(module).__name__]
    for module in parent.modules():
        for name in ("top_k", "num_experts_per_tok", "moe_top_k"):
            value = getattr(module, name, None)
            if isinstance(value, int) and 1 <= value <= num_experts:
                return value
    for name in ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k_experts", "top_k"):
        value = getattr(config, name, None)
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
