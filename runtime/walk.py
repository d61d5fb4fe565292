"""Walking a model through a text, greedily or along given tokens, and keeping the logits of each step.

Three sorts of models are told apart: those that generate token by token; those that refine a canvas of tokens; those
that only read. Knows transformers; knows nothing of stores or caches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedModel

from ..collect.anatomy import text_model

# P prompt tokens, C canvas tokens, V vocabulary

NO_TOKEN = 2**31 - 1  # an end-of-sequence id that no vocabulary has


@torch.inference_mode()
def walk(
    model: PreTrainedModel, ids_1P: torch.Tensor, tokens: int, forced: Sequence[int] | None = None
) -> tuple[list[int], list[torch.Tensor]]:
    """Generate greedily, or along the forced tokens, and give the tokens and the logits of each step.

    The first logits are those of the whole prompt without a cache: [1, P, V], or [1, 1, V] of a decoder's start. Those
    of the steps are [1, V] of a new token; [1, C, V] of a canvas, as many times as `tokens` asks for canvases; or those
    of a longer and longer part of the prompt, where a model only reads.
    """
    model = text_model(model)
    if hasattr(model.config, "canvas_length"):
        return _refine(model, ids_1P, tokens, forced)
    if not model.can_generate():
        return _read(model, ids_1P, tokens)
    return _generate(model, ids_1P, tokens, forced)


def _generate(
    model: Any, ids_1P: torch.Tensor, tokens: int, forced: Sequence[int] | None
) -> tuple[list[int], list[torch.Tensor]]:
    paired = bool(model.config.is_encoder_decoder)
    start = {"decoder_input_ids": torch.full((1, 1), _start_token(model))} if paired else {}
    whole = model(input_ids=ids_1P, **start, use_cache=False).logits
    config = GenerationConfig(
        max_new_tokens=tokens,
        do_sample=False,
        num_beams=1,
        eos_token_id=NO_TOKEN,
        pad_token_id=0,
        decoder_start_token_id=_start_token(model) if paired else None,
        output_logits=True,
        return_dict_in_generate=True,
    )
    processors = LogitsProcessorList([_Forced(forced)] if forced is not None else [])
    output: Any = model.generate(
        input_ids=ids_1P,
        attention_mask=torch.ones_like(ids_1P),
        generation_config=config,
        logits_processor=processors,
    )
    return output.sequences[0, -tokens:].tolist(), [whole, *output.logits]


def _refine(
    model: Any, ids_1P: torch.Tensor, tokens: int, forced: Sequence[int] | None
) -> tuple[list[int], list[torch.Tensor]]:
    """Refine a canvas: each step reads the likeliest tokens of the step before."""
    length = int(model.config.canvas_length)
    vocab_size = int(model.config.get_text_config().vocab_size)
    canvas = (torch.arange(1, length + 1) * 104729 % vocab_size)[None]
    chosen: list[int] = []
    logits = [model(input_ids=ids_1P, decoder_input_ids=canvas).logits]
    for step in range(-(-tokens // length)):
        canvas = logits[-1].argmax(-1)
        if forced is not None:
            canvas = torch.tensor([forced[step * length : (step + 1) * length]])
        chosen += canvas[0].tolist()
        logits.append(model(input_ids=ids_1P, decoder_input_ids=canvas).logits)
    return chosen, logits


def _read(model: Any, ids_1P: torch.Tensor, tokens: int) -> tuple[list[int], list[torch.Tensor]]:
    parts = range(1, 1 + min(tokens, ids_1P.shape[1]))
    logits = [model(input_ids=ids_1P).logits, *(model(input_ids=ids_1P[:, :part]).logits for part in parts)]
    return ids_1P[0, : len(parts)].tolist(), logits


class _Forced(LogitsProcessor):
    """Leave one token at each step."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens = iter(tokens)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        forced = torch.full_like(scores, -torch.inf)
        forced[:, next(self.tokens)] = 0.0
        return forced


def _start_token(model: PreTrainedModel) -> int:
    generation: Any = model.generation_config
    for value in (generation.decoder_start_token_id, getattr(model.config, "decoder_start_token_id", None)):
        if value is not None:
            return int(value)
    return 0
