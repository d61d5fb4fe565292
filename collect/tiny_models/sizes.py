"""Tiny sizes by the names that configs give to them. Knows config classes; builds no models."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig

VOCAB_SIZE = 320

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 8192,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
    "initializer_range": 0.1,  # at the usual 0.02 random routers hardly tell tokens apart
    # experts
    "moe_intermediate_size": 16,
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "moe_num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_topk": 3,
    "moe_k": 3,
    "top_k_experts": 3,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "moe_num_shared_experts": 1,
    "shared_expert_intermediate_size": 16,
    "shared_experts_intermediate_size": 16,
    "share_expert_dim": 16,
    "n_group": 1,
    "topk_group": 1,
    # multi-head latent attention
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    # linear attention
    "linear_num_heads": 4,
    "linear_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "sliding_window": 16,
    # sparse attention
    "index_n_heads": 4,
    "index_head_dim": 16,
    "index_topk": 16,
}
"""Value of a text config's field, wherever the field exists."""

TOWER_SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "depth": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_heads": 4,
    "head_dim": 8,
    "image_size": 32,
    "patch_size": 8,
    "text_hidden_size": 32,
    "out_hidden_size": 32,
    "vision_output_dim": 32,
    "projector_input_dim": 32,
    "projector_output_dim": 32,
    "projection_intermediate_size": 32,
    "projection_hidden_dim": 32,
    "adapter_in_dim": 32,
    "adapter_out_dim": 32,
    "adapter_input_size": 32,
    "moe_intermediate_size": 16,
    "num_local_experts": 8,
    "num_position_embeddings": 64,
    "position_embedding_size": 64,
}
"""Value of a field of a tower that text does not pass: vision, audio, speech."""


def tiny_config(config_class: type[PreTrainedConfig], values: Mapping[str, Any]) -> PreTrainedConfig:
    """Make a config of this class with tiny sizes; `values` come on top, sub-configs as dicts."""
    return config_class(**_values(config_class, values, SIZES))


def _values(config_class: Any, values: Mapping[str, Any], sizes: Mapping[str, Any]) -> dict[str, Any]:
    fields = {field.name for field in dataclasses.fields(config_class)}
    found = {name: value for name, value in sizes.items() if name in fields}
    for name, spec in (getattr(config_class, "sub_configs_defaults", None) or {}).items():
        part: Any = spec.config_class
        if part is AutoConfig:
            part = CONFIG_MAPPING[spec.model_type]
        own = values.get(name, {})
        if own is None:
            continue
        inner = SIZES if name.startswith(("text", "thinker")) else TOWER_SIZES
        found[name] = _values(part, own, inner)
        if spec.model_type:
            found[name]["model_type"] = spec.model_type
    parts = {name for name in found if isinstance(found[name], dict)}
    return {**found, **{name: value for name, value in values.items() if name not in parts or value is None}}
