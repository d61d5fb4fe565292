"""Tiny sizes of the families whose experts stand outside transformers' experts interface."""

from __future__ import annotations

from typing import Any

from .sizes import VOCAB_SIZE

FAMILIES: dict[str, dict[str, Any]] = {
    "dbrx": {
        "d_model": 32,
        "n_heads": 4,
        "n_layers": 2,
        "max_seq_len": 8192,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 16, "moe_num_experts": 8, "moe_top_k": 3},
    },
    "jetmoe": {"num_key_value_heads": 1, "kv_channels": 8, "intermediate_size": 16},
    "llama4": {
        "text_config": {
            "intermediate_size": 16,
            "intermediate_size_mlp": 48,
            "num_hidden_layers": 4,
            "interleave_moe_layer_step": 2,
            "attention_chunk_size": 16,
        },
        "vision_config": {"pixel_shuffle_ratio": 0.5},
    },
    "longcat_flash": {
        "num_key_value_heads": 4,
        "ffn_hidden_size": 48,
        "expert_ffn_hidden_size": 16,
        "zero_expert_num": 4,
        "routed_scaling_factor": 1.5,
    },
    "nllb_moe": {
        "d_model": 32,
        "encoder_layers": 4,
        "decoder_layers": 4,
        "encoder_ffn_dim": 16,
        "decoder_ffn_dim": 16,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_sparse_step": 2,
        "decoder_sparse_step": 2,
        "encoder_layerdrop": 0.0,
        "decoder_layerdrop": 0.0,
        "init_std": 0.1,
        "decoder_start_token_id": 2,
    },
    "step3p7": {"text_config": {"num_hidden_layers": 3, "mlp_layer_types": ["dense", "sparse", "sparse"]}},
    "switch_transformers": {
        "vocab_size": VOCAB_SIZE,
        "d_model": 32,
        "d_kv": 8,
        "d_ff": 16,
        "num_heads": 4,
        "num_layers": 4,
        "num_decoder_layers": 4,
        "num_sparse_encoder_layers": 2,
        "num_sparse_decoder_layers": 2,
        "expert_capacity": 64,
        "decoder_start_token_id": 0,
    },
}
