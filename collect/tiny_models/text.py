"""Tiny sizes of the families that read text with attention alone: what differs from `sizes.SIZES`."""

from __future__ import annotations

from typing import Any

_FIRST_DENSE: dict[str, Any] = {"num_hidden_layers": 3, "first_k_dense_replace": 1}
_SECOND_SPARSE: dict[str, Any] = {"num_hidden_layers": 3, "mlp_layer_types": ["dense", "sparse", "sparse"]}
_LATENT: dict[str, Any] = {"num_key_value_heads": 4}  # multi-head latent attention wants as many as heads
_LOCAL_EXPERTS: dict[str, Any] = {"intermediate_size": 16}
_ROPE: dict[str, Any] = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}

FAMILIES: dict[str, dict[str, Any]] = {
    "afmoe": {"num_hidden_layers": 3},
    "axk1": {**_FIRST_DENSE, **_LATENT},
    "axk2": {**_FIRST_DENSE, **_LATENT},
    "beam": _SECOND_SPARSE,
    "cohere2_moe": {},
    "deepseek_v2": {**_FIRST_DENSE, **_LATENT, "topk_method": "greedy"},
    "deepseek_v3": {**_FIRST_DENSE, **_LATENT},
    "deepseek_v32": {**_FIRST_DENSE, **_LATENT},
    "deepseek_v4": {
        "num_hidden_layers": 3,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "mlp_layer_types": ["hash_moe", "moe", "moe"],
        "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
        "hc_mult": 2,
        "o_groups": 2,
        "o_lora_rank": 8,
    },
    "dots1": _FIRST_DENSE,
    "ernie4_5_moe": {"num_hidden_layers": 3, "moe_layer_start_index": 1},
    "exaone_moe": _SECOND_SPARSE,
    "flex_olmo": _LOCAL_EXPERTS,
    "flint": {"num_hidden_layers": 3, "mlp_only_layers": [0]},
    "glm4_moe": _FIRST_DENSE,
    "glm4_moe_lite": {**_SECOND_SPARSE, **_LATENT},
    "glm_moe_dsa": {**_SECOND_SPARSE, **_LATENT},
    "gpt_oss": {**_LOCAL_EXPERTS, **_ROPE},
    "granitemoe": _LOCAL_EXPERTS,
    "granitemoe_swa": {**_LOCAL_EXPERTS, "shared_intermediate_size": 16},
    "granitemoeshared": {**_LOCAL_EXPERTS, "shared_intermediate_size": 16},
    "hunyuan_v1_moe": _LOCAL_EXPERTS,
    "hy_v3": _SECOND_SPARSE,
    "hy_v4": {**_SECOND_SPARSE, "hc_mult": 2},
    "kolibri1": {},
    "laguna": _SECOND_SPARSE,
    "mellum": {},
    "mimo_v2_flash": _SECOND_SPARSE,
    "minimax_m2": _LOCAL_EXPERTS,
    "mistral4": {**_FIRST_DENSE, **_LATENT},
    "mixtral": _LOCAL_EXPERTS,
    "olmoe": _LOCAL_EXPERTS,
    "openai_privacy_filter": {**_LOCAL_EXPERTS, **_ROPE},
    "phimoe": {**_LOCAL_EXPERTS, "num_experts_per_tok": 2},  # its router takes two, whatever the config says
    "qwen2_moe": {},
    "qwen3_moe": {"norm_topk_prob": True},
    "solar_open": {},
}
