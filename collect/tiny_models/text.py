"""Tiny sizes of the families that read text with attention alone."""

from __future__ import annotations

from typing import Any

_FIRST_DENSE: dict[str, Any] = {"num_hidden_layers": 3, "first_k_dense_replace": 1}
_LATENT: dict[str, Any] = {"num_key_value_heads": 4}  # multi-head latent attention wants as many as heads
_LOCAL_EXPERTS: dict[str, Any] = {"intermediate_size": 16}

FAMILIES: dict[str, dict[str, Any]] = {
    "deepseek_v2": {**_FIRST_DENSE, **_LATENT, "topk_method": "greedy"},
    "deepseek_v3": {**_FIRST_DENSE, **_LATENT},
    "ernie4_5_moe": {"num_hidden_layers": 3, "moe_layer_start_index": 1},
    "glm4_moe": _FIRST_DENSE,
    "gpt_oss": {**_LOCAL_EXPERTS, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    "granitemoe": _LOCAL_EXPERTS,
    "jamba": {
        **_LOCAL_EXPERTS,
        "num_hidden_layers": 4,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "mamba_d_state": 4,
    },
    "mixtral": _LOCAL_EXPERTS,
    "olmoe": _LOCAL_EXPERTS,
    "phimoe": {**_LOCAL_EXPERTS, "num_experts_per_tok": 2},  # its router takes two, whatever the config says
    "qwen2_moe": {},
    "qwen3_moe": {"norm_topk_prob": True},
}
