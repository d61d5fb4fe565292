"""The switch mini model: a Switch Transformers text-to-label model. Knows its losses and its held-out measures."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from transformers import (
    PreTrainedTokenizerFast,
    SwitchTransformersConfig,
    SwitchTransformersForConditionalGeneration,
)
from transformers.models.switch_transformers.modeling_switch_transformers import SwitchTransformersTop1Router

from .grouped import group_experts
from .recipe import Recipe, Schedule, Shape
from .tasks import Batch, Example, Tasks
from .text import Text

# B batch, S sequence, T = B*S tokens without padding, L MoE layers, E experts

ROUTER_STD = 0.1  # transformers starts routers at std 1, which is one-hot before anything is learnt


def build(
    shape: Shape, tokenizer: PreTrainedTokenizerFast, schedule: Schedule
) -> SwitchTransformersForConditionalGeneration:
    """Build the model with random weights."""
    config = SwitchTransformersConfig(
        vocab_size=shape.vocab_size,
        d_model=shape.hidden_size,
        d_kv=shape.hidden_size // shape.num_heads,
        d_ff=shape.expert_size,
        expert_capacity=shape.expert_capacity,
        num_layers=shape.num_layers,
        num_decoder_layers=shape.num_layers,
        num_sparse_encoder_layers=shape.num_layers,
        num_sparse_decoder_layers=shape.num_layers,
        num_heads=shape.num_heads,
        num_experts=shape.num_experts,
        router_jitter_noise=schedule.jitter,
        router_z_loss_coef=schedule.z_loss,
        router_aux_loss_coef=schedule.balance,
        dropout_rate=schedule.dropout,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        decoder_start_token_id=tokenizer.pad_token_id,  # pyright: ignore[reportCallIssue]
    )
    model = SwitchTransformersForConditionalGeneration(config)
    for module in model.modules():
        if isinstance(module, SwitchTransformersTop1Router):
            nn.init.normal_(module.classifier.weight, std=ROUTER_STD)
    return model


def router_logits(output: Any, batch: Batch) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """List, encoder layers first, the router logits (B, S, E) of each MoE layer with the mask (B, S) of real tokens."""
    sides = ((output.encoder_router_logits, batch.mask.bool()), (output.decoder_router_logits, batch.labels != -100))
    return [(logits_BSE.float(), mask_BS) for layers, mask_BS in sides for logits_BSE in layers]


def router_losses(output: Any, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mean load-balancing loss and z-loss of the layers, without padding.

    The model's own losses count padding and join the layers of a stack, where two uneven layers can hide each other.
    """
    balance, z_loss = [], []
    for logits_BSE, mask_BS in router_logits(output, batch):
        logits_TE = logits_BSE[mask_BS]
        probs_TE = logits_TE.softmax(-1)
        num_experts = logits_TE.shape[-1]
        load_E = torch.bincount(logits_TE.argmax(-1), minlength=num_experts) / len(logits_TE)
        balance.append(num_experts * (load_E * probs_TE.mean(0)).sum())  # Switch Transformers eq. 4
        z_loss.append(logits_TE.logsumexp(-1).square().mean())  # ST-MoE eq. 5
    return torch.stack(balance).mean(), torch.stack(z_loss).mean()


class Switch:
    """Feed the loop: a loss by step, and the held-out accuracies and loads."""

    def __init__(self, recipe: Recipe, tokenizer: PreTrainedTokenizerFast, train: Text, held_out: Text) -> None:
        self.recipe = recipe
        self.model = build(recipe.shape, tokenizer, recipe.schedule)
        group_experts(self.model)
        room = recipe.schedule.sequence_tokens
        self.train = Tasks(tokenizer, train, max_tokens=room, seed=recipe.seed)
        self.held_out = Tasks(tokenizer, held_out, max_tokens=room, seed=recipe.seed)

    def loss(self, step: int) -> tuple[torch.Tensor, int]:
        """Return the loss of one step and its encoder and decoder tokens."""
        batch = self.train.batch(step, self.recipe.schedule.batch_size)
        output = run(self.model, batch)
        each_T = F.cross_entropy(output.logits.flatten(0, 1).float(), batch.labels.flatten(), reduction="none")
        loss = (each_T * batch.weights.flatten()).sum() / len(batch.ids)
        balance, z_loss = router_losses(output, batch)
        schedule = self.recipe.schedule
        tokens = int(batch.mask.sum()) + int((batch.labels != -100).sum())
        return loss + schedule.balance * balance + schedule.z_loss * z_loss, tokens

    def measure(self) -> dict[str, Any]:
        """Measure accuracies, span perplexity and the lowest entropy share on the held-out text."""
        report = measure(self.model, self.held_out)
        share_LE = report["counts_LE"] / report["counts_LE"].sum(1, keepdims=True)
        entropy_L = -(share_LE * np.log(np.maximum(share_LE, 1e-12))).sum(1) / math.log(share_LE.shape[1])
        return {
            "sst2_accuracy": round(report["correct"]["sst2"] / len(self.held_out.sst2), 4),
            "mrpc_accuracy": round(report["correct"]["mrpc"] / len(self.held_out.mrpc), 4),
            "span_perplexity": round(report["span_perplexity"], 2),
            "entropy_share_min": round(float(entropy_L.min()), 3),
        }


def run(model: SwitchTransformersForConditionalGeneration, batch: Batch) -> Any:
    """Run the model with the targets fed to the decoder; routers report, losses are left to the caller."""
    decoder_ids = model.prepare_decoder_input_ids_from_labels(batch.labels)
    return model(
        input_ids=batch.ids,
        attention_mask=batch.mask,
        decoder_input_ids=decoder_ids,
        output_router_logits=True,
        use_cache=False,
    )


def measure(model: SwitchTransformersForConditionalGeneration, tasks: Tasks, size: int = 64) -> dict[str, Any]:
    """Count correct first label tokens by task, tokens by expert (L, E), drops by layer, and the span perplexity.

    A label counts as correct where greedy decoding starts with its first token, over the whole vocabulary.
    """
    rng = np.random.default_rng(tasks.seed)
    spans = [(tasks.spans_example(line[: tasks.max_tokens - 1], rng), -1) for line in tasks.lines[::4]]
    sides = {"sst2": tasks.labelled("sst2"), "mrpc": tasks.labelled("mrpc"), "spans": spans}
    counts, drops, correct = None, None, {"sst2": 0, "mrpc": 0}
    total, tokens = 0.0, 0
    for task, examples in sides.items():
        examples.sort(key=lambda pair: len(pair[0].source))
        for start in range(0, len(examples), size):
            chunk: list[tuple[Example, int]] = examples[start : start + size]
            batch = tasks.collate([example for example, _ in chunk])
            with torch.inference_mode():
                output = run(model, batch)
            if task == "spans":
                logits = output.logits.flatten(0, 1).float()
                total += float(F.cross_entropy(logits, batch.labels.flatten(), reduction="sum"))
                tokens += int((batch.labels != -100).sum())
                continue
            answers = torch.tensor([tasks.labels[task][label][0] for _, label in chunk])
            correct[task] += int((output.logits[:, 0].argmax(-1) == answers).sum())
            layers = [
                _load(logits_BSE, mask_BS, model.config.expert_capacity)
                for logits_BSE, mask_BS in router_logits(output, batch)
            ]
            counts = np.stack([load for load, _ in layers]) + (0 if counts is None else counts)
            drops = np.array([dropped for _, dropped in layers]) + (0 if drops is None else drops)
    assert counts is not None
    assert drops is not None
    return {
        "correct": correct,
        "counts_LE": counts,
        "drop_share_L": drops / counts.sum(1),
        "span_perplexity": math.exp(total / max(1, tokens)),
    }


def _load(logits_BSE: torch.Tensor, mask_BS: torch.Tensor, capacity: int) -> tuple[np.ndarray, int]:
    chosen_BS = logits_BSE.argmax(-1)
    one_hot_BSE = F.one_hot(chosen_BS, logits_BSE.shape[-1])
    place_BS = (one_hot_BSE.cumsum(1) * one_hot_BSE).sum(-1)  # how many of the sequence came to this expert so far
    load_E = torch.bincount(chosen_BS[mask_BS], minlength=logits_BSE.shape[-1]).numpy()
    return load_E, int((place_BS[mask_BS] > capacity).sum())
