"""Tiny random models and a tokenizer for tests and tries, made in code without a download. Knows no traces or stores.

    model = tiny_models.build("qwen3_moe")                        # 2 MoE layers x 8 experts, top-3, in eval mode
    model = tiny_models.build("switch_transformers", expert_capacity=2)
    tokenizer = tiny_models.tokenizer()                           # a token per byte, 260 ids: in every vocabulary

Top-k is 3 where the family allows it: with two experts a + b = b + a hides a wrong order of summation.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from .errors import SettingError

TinyModel = Literal[
    "deepseek_v2",
    "deepseek_v3",
    "ernie4_5_moe",
    "glm4_moe",
    "gpt_oss",
    "granitemoe",
    "jamba",
    "mixtral",
    "olmoe",
    "phimoe",
    "qwen2_moe",
    "qwen3_moe",
    "switch_transformers",
]

VOCAB_SIZE = 320
PAD, EOS, BOS, UNK = "<pad>", "</s>", "<s>", "<unk>"
SPECIAL_TOKENS = (PAD, EOS, BOS, UNK)  # ids 0..3

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
    "initializer_range": 0.1,  # at the usual 0.02 random routers hardly tell tokens apart
}
_ATTENTION_DEEPSEEK: dict[str, Any] = {
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,  # multi-head latent attention wants as many as heads
}
_FIRST_DENSE: dict[str, Any] = {
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
}
_LOCAL_EXPERTS: dict[str, Any] = {"intermediate_size": 16, "num_local_experts": 8, "num_experts_per_tok": 3}

FAMILIES: dict[str, dict[str, Any]] = {
    "deepseek_v2": {**_FIRST_DENSE, **_ATTENTION_DEEPSEEK, "topk_method": "greedy", "head_dim": 8},
    "deepseek_v3": {**_FIRST_DENSE, **_ATTENTION_DEEPSEEK},
    "ernie4_5_moe": {
        "num_hidden_layers": 3,
        "moe_layer_start_index": 1,
        "moe_intermediate_size": 16,
        "moe_num_experts": 8,
        "moe_k": 3,
        "moe_num_shared_experts": 1,
    },
    "glm4_moe": {**_FIRST_DENSE, "head_dim": 8},
    "gpt_oss": {
        **_LOCAL_EXPERTS,
        "head_dim": 8,
        "sliding_window": 16,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "granitemoe": _LOCAL_EXPERTS,
    "jamba": {
        "intermediate_size": 16,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "num_hidden_layers": 4,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "mamba_d_state": 4,
    },
    "mixtral": {**_LOCAL_EXPERTS, "head_dim": 8},
    "olmoe": {"intermediate_size": 16, "num_experts": 8, "num_experts_per_tok": 3},
    "phimoe": {**_LOCAL_EXPERTS, "num_experts_per_tok": 2},  # its router takes two, whatever the config says
    "qwen2_moe": {
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "decoder_sparse_step": 1,
    },
    "qwen3_moe": {
        "head_dim": 8,
        "moe_intermediate_size": 16,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "decoder_sparse_step": 1,
        "norm_topk_prob": True,
    },
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
        "num_experts": 8,
        "expert_capacity": 64,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "decoder_start_token_id": 0,
    },
}
assert set(FAMILIES) == set(get_args(TinyModel))


def build(name: str, *, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """Build a tiny random float32 model of a family in eval mode; equal arguments give equal weights.

    Args:
        name: a key of `FAMILIES`.
        seed: of the weights; the global random state is left as it was.
        overrides: config values in place of the tiny ones, as `num_experts=16` or `expert_capacity=2`.

    Raises:
        SettingError: if the name is no key of `FAMILIES`.
    """
    if name not in FAMILIES:
        raise SettingError(f"name must be one of {', '.join(FAMILIES)}, got {name!r}.")
    paired = name == "switch_transformers"
    config = CONFIG_MAPPING[name](**{**({} if paired else _COMMON), **FAMILIES[name], **overrides})
    factory = AutoModelForSeq2SeqLM if paired else AutoModelForCausalLM
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return factory.from_config(config).eval()


def tokenizer(*, add_eos: bool = False) -> PreTrainedTokenizerFast:
    """Build a tokenizer with one token per UTF-8 byte: ids 0..3 are special, the byte tokens follow.

    Args:
        add_eos: end each text with EOS, as encoder-decoder models want it.
    """
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate([*SPECIAL_TOKENS, *letters])}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token=UNK))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    if add_eos:
        core.post_processor = processors.TemplateProcessing(
            single=f"$A {EOS}", pair=f"$A {EOS} $B {EOS}", special_tokens=[(EOS, SPECIAL_TOKENS.index(EOS))]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token=PAD, eos_token=EOS, bos_token=BOS, unk_token=UNK, model_max_length=8192
    )
