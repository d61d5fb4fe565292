"""Tiny sizes of the families whose text model stands inside a model that also sees or hears."""

from __future__ import annotations

from typing import Any

_LINEAR_FIRST: dict[str, Any] = {"layer_types": ["linear_attention", "full_attention"]}
_SECOND_SPARSE: dict[str, Any] = {"num_hidden_layers": 3, "mlp_layer_types": ["dense", "sparse", "sparse"]}
_MROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
_INKLING: dict[str, Any] = {
    "unpadded_vocab_size": 300,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 8,
    "sliding_window_size": 16,
    "rel_extent": 32,
    "d_rel": 4,
    "layer_types": ["hybrid_sliding", "hybrid"],
}
_TALKER: dict[str, Any] = {"vocab_size": 64, "num_key_value_heads": 2, "num_experts": 8}
_SPEECH: dict[str, Any] = {
    "num_mel_bins": 8,
    "encoder_layers": 1,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 32,
    "d_model": 32,
    "output_dim": 32,
    "max_source_positions": 64,
    "downsample_hidden_size": 16,
}
_OCR: dict[str, Any] = {
    "sam_config": {
        "hidden_size": 16,
        "output_channels": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 64,
        "patch_size": 16,
        "window_size": 4,
        "global_attn_indexes": [0],
    },
    "encoder_config": {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
    },
}

FAMILIES: dict[str, dict[str, Any]] = {
    "aria": {"text_config": {"intermediate_size": 16}},
    "deepseek_ocr2": {
        "text_config": {**_SECOND_SPARSE, "num_key_value_heads": 4},
        "vision_config": {
            "sam_config": {**_OCR["sam_config"], "mlp_ratio": 2.0, "downsample_channels": [16, 32]},
            "encoder_config": {**_OCR["encoder_config"], "num_key_value_heads": 4, "vocab_size": 8},
        },
    },
    "diffusion_gemma": {
        "text_config": {"layer_types": ["sliding_attention", "full_attention"]},
        "canvas_length": 16,
        "vision_config": {"position_embedding_size": 64},
    },
    "dots3_note": {
        "text_config": {**_SECOND_SPARSE, "num_key_value_heads": 4, "layer_types": ["indexed_attention"] * 3},
        "vision_config": {"mlp_layer_types": ["sparse"]},
        "audio_config": {"feature_size": 16, "downsample_hidden_size": 16, "max_position_embeddings": 64},
    },
    "ernie4_5_vl_moe": {
        "text_config": {
            "num_hidden_layers": 3,
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "moe_intermediate_size": [16, 24],  # text and vision experts differ
            "rope_parameters": {**_MROPE, "mrope_section": [1, 1, 2]},
        }
    },
    "gemma4": {
        "text_config": {
            "enable_moe_block": True,
            "vocab_size_per_layer_input": 320,
            "hidden_size_per_layer_input": 8,
            "global_head_dim": 16,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        "audio_config": None,
    },
    "glm4v_moe": {"text_config": {**_SECOND_SPARSE, "rope_parameters": {**_MROPE, "partial_rotary_factor": 1.0}}},
    "glm5_next": {
        "text_config": {
            **_SECOND_SPARSE,
            "num_key_value_heads": 4,
            "hc_mult": 2,
            "qk_rope_head_dim": 0,
            "layer_types": ["indexed_attention", "linear_attention", "indexed_attention"],
        }
    },
    "hy_v4_vl": {
        "text_config": {**_SECOND_SPARSE, "hc_mult": 2, "rope_parameters": _MROPE},
        "vision_config": {"max_image_size": 32},
    },
    "inkling": {
        "text_config": {**_INKLING, "num_hidden_layers": 3, "layer_types": ["hybrid_sliding", "hybrid", "hybrid"]},
        # as many layers as the tower has scales: with fewer it asks scipy which to skip
        "vision_config": {"num_hidden_layers": 4, "patch_size": 4},
        "audio_config": {"n_mel_bins": 4, "mel_vocab_size": 8},
    },
    "inkling2": {"text_config": _INKLING, "vision_config": {"posemb_grid_size": 4}},
    "inkling2_loop": {
        "text_config": {
            **_INKLING,
            "num_hidden_layers": 4,
            "layer_types": ["hybrid_sliding", "hybrid", "hybrid_sliding", "hybrid"],
            "n_layers_per_attn_res_block": 1,
            "loop_layer_index_start": 1,
            "loop_layer_index_end": 3,
            "loop_gate_rank": 4,
        },
        "vision_config": {"posemb_grid_size": 4},
    },
    "minimax_m3_vl": {
        "text_config": {
            "intermediate_size": 16,
            "dense_intermediate_size": 48,
            "shared_intermediate_size": 16,
            "rotary_dim": 8,
            **_SECOND_SPARSE,
        },
        "projector_hidden_size": 32,
    },
    "mistral_large4": {"text_config": {**_SECOND_SPARSE, "num_key_value_heads": 4}},
    "muse_spark": {
        "text_config": {"moe_hidden_size": 16},
        "vision_config": {"pos_emb_height": 4, "pos_emb_width": 4},
        "audio_config": {"patch_sizes": [2], "hidden_sizes": [16], "depths": [1], "num_hidden_layers": 1},
        "out_hidden_size": 32,
        "projector_hidden_size": 32,
    },
    "qwen3_5_moe": {"text_config": _LINEAR_FIRST},
    "qwen3_omni_moe": {
        "talker_config": {
            "text_config": {**_TALKER, "num_experts_per_tok": 3, "shared_expert_intermediate_size": 16},
            "code_predictor_config": {**_TALKER, "num_code_groups": 4},
            "thinker_hidden_size": 32,
            "num_code_groups": 4,
            "accept_hidden_layer": 1,
            "spatial_merge_size": 2,  # the talker asks its config for what this version leaves out of it
        },
        "thinker_config": {
            "vision_config": {"deepstack_visual_indexes": [0]},
            "audio_config": _SPEECH,
            "vision_start_token_id": 300,
        },
        "code2wav_config": {
            "codebook_size": 16,
            "num_quantizers": 4,
            "decoder_dim": 16,
            "upsample_rates": [2],
            "upsampling_ratios": [2],
        },
    },
    "qwen3_vl_moe": {"vision_config": {"deepstack_visual_indexes": [0]}},
    "qwen4_exp": {
        "text_config": {
            "layer_types": ["linear_attention", "indexed_attention"],
            "hc_lowrank": 8,
            "indexer_n_heads": 2,
            "indexer_kv_heads": 1,
            "indexer_head_dim": 8,
            "indexer_budget": 16,
            "indexer_compress_ratio": 4,
        }
    },
    "unlimited_ocr": {
        "text_config": {"num_hidden_layers": 3, "num_key_value_heads": 4, "first_k_dense_replace": 1},
        "vision_config": {
            "sam_config": {**_OCR["sam_config"], "mlp_dim": 16, "downsample_channels": [16, 16]},
            "encoder_config": {**_OCR["encoder_config"], "image_size": 32, "patch_size": 16},
        },
    },
}
