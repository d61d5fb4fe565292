"""The causal mini model: a Qwen3-MoE language model. Knows packed text, its loss and its held-out measures."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from .recipe import Recipe, Shape
from .text import Text

# B batch, S sequence, T = B*S tokens, L MoE layers, E experts, K top-k

HELD_OUT_TOKENS = 24_576  # tokens of one point of the curve; the card measures all of the held-out text


def build(shape: Shape, tokenizer: PreTrainedTokenizerFast, balance: float) -> Qwen3MoeForCausalLM:
    """Build the model with random weights."""
    config = Qwen3MoeConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.top_k * shape.expert_size,
        moe_intermediate_size=shape.expert_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.hidden_size // shape.num_heads,  # pyright: ignore[reportCallIssue]
        num_experts=shape.num_experts,  # pyright: ignore[reportCallIssue]
        num_experts_per_tok=shape.top_k,
        norm_topk_prob=True,
        max_position_embeddings=shape.max_length,
        tie_word_embeddings=True,
        router_aux_loss_coef=balance,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return Qwen3MoeForCausalLM(config)


def pack(tokenizer: PreTrainedTokenizerFast, text: Text, length: int, seed: int) -> torch.Tensor:
    """Join the documents in a random order, each ended by <eos>, and cut them into rows (N, length)."""
    documents = [line for lines in text.documents.values() for line in lines]
    order = np.random.default_rng(seed).permutation(len(documents))
    rows = tokenizer([documents[index] for index in order], verbose=False)["input_ids"]
    end = tokenizer.eos_token_id
    flat = np.fromiter((token for row in rows for token in (*row, end)), dtype=np.int64)
    count = max(1, len(flat) // length)
    return torch.from_numpy(np.resize(flat, count * length).reshape(count, length))


class Causal:
    """Feed the loop: a loss by step, and the held-out perplexity."""

    def __init__(self, recipe: Recipe, tokenizer: PreTrainedTokenizerFast, train: Text, held_out: Text) -> None:
        self.recipe = recipe
        self.model = build(recipe.shape, tokenizer, recipe.schedule.balance)
        self.model.set_experts_implementation("grouped_mm")
        length = recipe.schedule.sequence_tokens
        self.rows_NS = pack(tokenizer, train, length, recipe.seed)
        self.held_out_NS = pack(tokenizer, held_out, length, recipe.seed)

    def loss(self, step: int) -> tuple[torch.Tensor, int]:
        """Return the loss of one step and its tokens; rows come in a new order in each epoch."""
        batch = self.recipe.schedule.batch_size
        per_epoch = max(1, len(self.rows_NS) // batch)
        epoch, place = divmod(step, per_epoch)
        order = np.random.default_rng((self.recipe.seed, epoch)).permutation(len(self.rows_NS))
        ids_BS = self.rows_NS[order[place * batch : (place + 1) * batch]]
        output = self.model(input_ids=ids_BS, output_router_logits=True, use_cache=False)
        loss = F.cross_entropy(output.logits[:, :-1].flatten(0, 1).float(), ids_BS[:, 1:].flatten())
        # by layer: the model's own loss adds the layers up first, where two uneven layers can hide each other
        balance = sum(
            load_balancing_loss_func((logits_TE,), self.recipe.shape.num_experts, self.recipe.shape.top_k)
            for logits_TE in output.router_logits
        )
        return loss + self.recipe.schedule.balance * balance / self.recipe.shape.num_layers, ids_BS.numel()

    def measure(self) -> dict[str, Any]:
        """Measure perplexity on a part of the held-out text."""
        rows = max(1, HELD_OUT_TOKENS // self.recipe.schedule.sequence_tokens)
        perplexity, counts_LE = measure(self.model, self.held_out_NS[:rows])
        return {"perplexity": round(perplexity, 2), "entropy_share_min": round(_lowest(counts_LE), 3)}


def measure(model: Qwen3MoeForCausalLM, rows_NS: torch.Tensor, batch: int = 8) -> tuple[float, np.ndarray]:
    """Return the perplexity of rows (N, S) and the counts (L, E) of chosen experts."""
    shape = model.config
    counts_LE = np.zeros((shape.num_hidden_layers, shape.num_experts), dtype=np.int64)
    total, tokens = 0.0, 0
    with torch.inference_mode():
        for ids_BS in rows_NS.split(batch):
            output = model(input_ids=ids_BS, output_router_logits=True, use_cache=False)
            logits = output.logits[:, :-1].flatten(0, 1).float()
            total += float(F.cross_entropy(logits, ids_BS[:, 1:].flatten(), reduction="sum"))
            tokens += ids_BS[:, 1:].numel()
            for layer, logits_TE in enumerate(output.router_logits):
                chosen_TK = logits_TE.float().topk(shape.num_experts_per_tok).indices
                counts_LE[layer] += np.bincount(chosen_TK.flatten().numpy(), minlength=shape.num_experts)
    return math.exp(total / tokens), counts_LE


def _lowest(counts_LE: np.ndarray) -> float:
    share = counts_LE / counts_LE.sum(1, keepdims=True)
    terms = np.where(share > 0, share * np.log(np.maximum(share, 1e-12)), 0.0)
    return float((-terms.sum(1) / math.log(counts_LE.shape[1])).min())
