"""Byte-level BPE tokenizers of the mini models. Learns merges from text; knows no models.

causal: `<bos> text`, documents end with <eos>. switch: `text <eos>` with the sentinels of T5 for masked spans.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

Kind = Literal["causal", "switch"]

PAD, BEGIN, END = "<pad>", "<bos>", "<eos>"
INPUTS = ["input_ids", "attention_mask"]
NUM_SENTINELS = 16
SENTINELS = [f"<extra_id_{index}>" for index in range(NUM_SENTINELS)]
SPECIALS: dict[Kind, list[str]] = {"causal": [PAD, BEGIN, END], "switch": [PAD, END, *SENTINELS]}

# A base model was never taught turns: messages are simply joined, so that chat endpoints answer with a continuation.
CHAT_TEMPLATE = "{{ bos_token }}{% for message in messages %}{{ message['content'] }}\n{% endfor %}"


def train_tokenizer(kind: Kind, lines: Iterable[str], *, vocab_size: int, max_length: int) -> PreTrainedTokenizerFast:
    """Learn a tokenizer whose special tokens come first."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIALS[kind],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(lines, trainer)
    if kind == "causal":
        core.post_processor = processors.TemplateProcessing(
            single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", core.token_to_id("<bos>"))]
        )
        return PreTrainedTokenizerFast(
            tokenizer_object=core,
            model_max_length=max_length,
            model_input_names=INPUTS,
            pad_token=PAD,
            bos_token=BEGIN,
            eos_token=END,
            chat_template=CHAT_TEMPLATE,
            clean_up_tokenization_spaces=False,
        )
    core.post_processor = processors.TemplateProcessing(
        single="$A <eos>", pair="$A $B <eos>", special_tokens=[("<eos>", core.token_to_id("<eos>"))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        model_max_length=max_length,
        model_input_names=INPUTS,
        pad_token=PAD,
        eos_token=END,
        extra_special_tokens=SENTINELS,
        clean_up_tokenization_spaces=False,
    )
