"""Running a model over a batch of pieces and giving trace rows. Knows models and the recorder; knows no files.

A causal model runs one forward over the texts, or a generation after them. An encoder-decoder model gives two rows for
each piece: the encoder's for the text, and the decoder's for its target text (teacher forcing), for what it generates,
or, without either, for its start token alone. A model that refines a canvas of tokens gives the canvas as its decoder's
row: random tokens, which is where refining starts, after the target text where there is one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig

from .anatomy import text_model
from .assembly import Recorded, record_forward, record_generation
from .batches import Piece, pad
from .errors import SettingError
from .recorder import RoutingRecorder
from .shard import SequenceRouting
from .topology import Stack

# B batch, P prompt tokens (padded), G generated tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class Generation:
    """Set how tokens are generated after each text."""

    max_new_tokens: int
    """Most new tokens of a sequence."""
    temperature: float = 0.0
    """0 takes the most likely token; above, tokens are drawn."""
    seed: int = 0
    """Seed of the drawing, together with the batch's place in the corpus."""

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise SettingError(f"max_new_tokens must be at least 1, got {self.max_new_tokens}.")
        if self.temperature < 0:
            raise SettingError(f"temperature must be 0 or more, got {self.temperature}.")


class Passes:
    """Run batches through a model under a recorder.

    Args:
        model: in eval mode.
        recorder: of the same model, entered.
        tokenizer: for texts, where they are wanted.
        generation: None for a plain forward.
        text: put each sequence's text into its row.
    """

    def __init__(
        self,
        model: Any,
        recorder: RoutingRecorder,
        tokenizer: Any,
        generation: Generation | None,
        *,
        text: bool = False,
    ) -> None:
        self.model, self.recorder, self.tokenizer = text_model(model), recorder, tokenizer
        self.generation, self.text = generation, text
        self.paired = "encoder" in recorder.topology.stacks
        self.canvas_length: int | None = getattr(model.config, "canvas_length", None)
        if generation is not None and (self.canvas_length or not self.model.can_generate()):
            how = "refines a canvas of tokens" if self.canvas_length else "does not generate"
            raise SettingError(f"generate must be 0 for {type(model).__name__}, which {how}; record a plain forward.")
        self.device = next(model.parameters()).device
        own: Any = (
            getattr(self.model, "generation_config", None) or GenerationConfig()
        )  # None where a model does not generate
        end_ids = own.eos_token_id
        self.end_ids: list[int] = end_ids if isinstance(end_ids, list) else [] if end_ids is None else [end_ids]
        known = (tokenizer.pad_token_id, own.pad_token_id, *self.end_ids, 0)
        self.pad_id = next(value for value in known if value is not None)

    def __call__(self, batch: Sequence[Piece], number: int) -> list[list[SequenceRouting]]:
        """Give the rows of each piece of a batch, in its order.

        Args:
            batch: pieces.
            number: of the batch in the corpus, so that a resumed run draws the same tokens.
        """
        self.recorder.clear()
        with torch.inference_mode():
            if self.canvas_length is not None:  # one by one: the canvas' positions follow the padded prompt
                return [rows for piece in batch for rows in self._paired([piece], number)]
            return self._paired(batch, number) if self.paired else self._causal(batch, number)

    def _causal(self, batch: Sequence[Piece], number: int) -> list[list[SequenceRouting]]:
        topology = self.recorder.topology
        ids_BP, mask_BP = pad([piece.token_ids for piece in batch], self.pad_id, "left" if self.generation else "right")
        ids, mask = self._tensor(ids_BP), self._tensor(mask_BP).long()
        if self.generation:
            new_BG = self._generate(number, input_ids=ids, attention_mask=mask)[:, ids_BP.shape[1] :]
            routing = self.recorder.take()
            recorded = record_generation(topology, routing, "causal", ids_BP, mask_BP, new_BG, self.end_ids)
        else:
            # the inner model: nobody needs the logits, and over a large vocabulary they cost as much as the layers
            self.model.base_model(input_ids=ids, attention_mask=mask, use_cache=False)
            recorded = record_forward(topology, self.recorder.take(), "causal", ids_BP, mask_BP)
        prompts = mask_BP.sum(1).tolist() if self.generation else [None] * len(batch)
        return [[self._row(*item, "causal")] for item in zip(batch, recorded, prompts, strict=True)]

    def _paired(self, batch: Sequence[Piece], number: int) -> list[list[SequenceRouting]]:
        topology = self.recorder.topology
        ids_BP, mask_BP = pad([piece.token_ids for piece in batch], self.pad_id, "right")
        ids, mask = self._tensor(ids_BP), self._tensor(mask_BP).long()
        prompts: list[int | None] = [None] * len(batch)
        if self.generation:
            output_BG = self._generate(number, input_ids=ids, attention_mask=mask)
            routing = self.recorder.take()
            start_B1, every_B1 = output_BG[:, :1], np.ones((len(batch), 1), bool)
            decoded = record_generation(
                topology, routing, "decoder", start_B1, every_B1, output_BG[:, 1:], self.end_ids
            )
            prompts = [1] * len(batch)
        else:
            inputs = [self._decoder_input(piece, number) for piece in batch]
            decoder_BT, decoder_mask_BT = pad(inputs, self.pad_id, "right")
            decoder: dict[str, Any] = {"decoder_input_ids": self._tensor(decoder_BT)}
            if self.canvas_length is None:  # a canvas has no padding, and needs the cache that its prompt fills
                decoder |= {"decoder_attention_mask": self._tensor(decoder_mask_BT).long(), "use_cache": False}
            self.model(input_ids=ids, attention_mask=mask, **decoder)
            routing = self.recorder.take()
            decoded = record_forward(topology, routing, "decoder", decoder_BT, decoder_mask_BT)
        encoded = record_forward(topology, routing, "encoder", ids_BP, mask_BP)
        return [
            [self._row(piece, left, None, "encoder"), self._row(piece, right, prompt, "decoder")]
            for piece, left, right, prompt in zip(batch, encoded, decoded, prompts, strict=True)
        ]

    def _decoder_input(self, piece: Piece, number: int) -> list[int]:
        """Give what the decoder reads: the target text after the start token, or a canvas that the target begins."""
        target = piece.target_ids or []
        if self.canvas_length is None:
            start = self.model.generation_config.decoder_start_token_id
            start = self.model.config.decoder_start_token_id if start is None else start
            return [start, *(target or [start])[:-1]]
        generator = np.random.default_rng((number, *piece.sequence.encode()))
        vocab_size = int(self.model.config.get_text_config().vocab_size)
        return [*target, *generator.integers(0, vocab_size, self.canvas_length).tolist()][: self.canvas_length]

    def _generate(self, number: int, **inputs: torch.Tensor) -> np.ndarray:
        assert self.generation is not None
        own = self.model.generation_config
        config = GenerationConfig(
            max_new_tokens=self.generation.max_new_tokens,
            do_sample=self.generation.temperature > 0,
            temperature=self.generation.temperature or None,
            top_k=None,
            eos_token_id=own.eos_token_id,
            bos_token_id=own.bos_token_id,
            pad_token_id=self.pad_id,
            decoder_start_token_id=own.decoder_start_token_id,
        )
        cuda = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices=cuda):
            torch.manual_seed((self.generation.seed * 1_000_003 + number) % 2**63)
            return self.model.generate(**inputs, generation_config=config).cpu().numpy()

    def _row(self, piece: Piece, recorded: Recorded, prompt_tokens: int | None, stack: Stack) -> SequenceRouting:
        text = self.tokenizer.decode(recorded.token_ids, skip_special_tokens=True) if self.text else None
        return SequenceRouting(
            sequence=piece.sequence,
            stack=stack,
            token_ids=recorded.token_ids,
            experts=recorded.experts,
            weights=recorded.weights,
            scores=recorded.scores,
            hidden=recorded.hidden,
            group=piece.group,
            category=piece.document.category,
            source=piece.document.source,
            prompt_tokens=prompt_tokens,
            text=text,
        )

    def _tensor(self, values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values).to(self.device)
