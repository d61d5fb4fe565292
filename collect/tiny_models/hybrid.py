"""Tiny sizes of the families that mix attention with state-space, linear or convolution layers."""

from __future__ import annotations

from typing import Any

_LINEAR_FIRST: dict[str, Any] = {"layer_types": ["linear_attention", "full_attention"]}

FAMILIES: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {
        "num_hidden_layers": 3,
        "num_key_value_heads": 4,
        "first_k_dense_replace": 1,
        "layer_types": ["full_attention", "linear_attention", "full_attention"],
    },
    "granitemoehybrid": {
        **_LINEAR_FIRST,
        "intermediate_size": 16,
        "shared_intermediate_size": 16,
        "mamba_n_heads": 8,
        "mamba_d_state": 4,
        "mamba_chunk_size": 16,
    },
    "jamba": {
        "intermediate_size": 16,
        "num_hidden_layers": 4,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "mamba_d_state": 4,
    },
    "kimi_linear": {
        "num_hidden_layers": 3,
        "num_key_value_heads": 4,
        "layer_types": ["full_attention", "linear_attention", "full_attention"],
    },
    "lara_mini": {},
    "lfm2_moe": {
        "num_hidden_layers": 3,
        "num_dense_layers": 1,
        "layer_types": ["conv", "full_attention", "conv"],
    },
    "minimax": {"intermediate_size": 16, "layer_types": ["linear_attention", "full_attention"], "block_size": 16},
    "nemotron_h": {
        "num_hidden_layers": 4,
        "layers_block_type": ["mamba", "moe", "attention", "moe"],
        "moe_latent_size": 16,
        "moe_shared_expert_intermediate_size": 16,
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "n_groups": 2,
        "ssm_state_size": 8,
        "chunk_size": 16,
    },
    "qwen3_next": _LINEAR_FIRST,
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 16},
}
