"""One run of the recipe: text, tokenizer, training, export. Knows the order and nothing else."""

from __future__ import annotations

import logging

import torch
from transformers import PreTrainedTokenizerFast

from .card import write_card
from .causal import Causal
from .loop import Loop
from .recipe import Recipe
from .switch import Switch
from .tasks import LABEL_LINES
from .text import Text, data_folder, read_text
from .tokenizer import train_tokenizer

log = logging.getLogger(__name__)

FEEDS: dict[str, type[Causal] | type[Switch]] = {"causal": Causal, "switch": Switch}
LABEL_REPEATS = 500  # often enough for each label to become few tokens


def train_mini(recipe: Recipe) -> None:
    """Train, or finish, a mini model and write it to the output folder."""
    torch.set_num_threads(recipe.threads)
    train, held_out = read_text(data_folder(recipe.data), max_documents=recipe.max_documents)
    tokenizer = learn_tokenizer(recipe, train)
    torch.manual_seed(recipe.seed)
    feed = FEEDS[recipe.kind](recipe, tokenizer, train, held_out)
    loop = Loop(recipe, feed.model, feed.loss, feed.measure)
    loop.resume()
    loop.run()
    export(recipe, feed.model, tokenizer)
    write_card(recipe, loop, train, held_out)
    log.info("wrote %s", recipe.output)


def learn_tokenizer(recipe: Recipe, train: Text) -> PreTrainedTokenizerFast:
    """Learn the tokenizer from the training text, the same for the same text."""
    lines = [line for documents in train.documents.values() for line in documents]
    if recipe.kind == "switch":
        lines += LABEL_LINES * LABEL_REPEATS
        lines += [f" {phrase}" for phrase, _ in train.sst2]  # words that carry the label should be one token
    return train_tokenizer(recipe.kind, lines, vocab_size=recipe.shape.vocab_size, max_length=recipe.shape.max_length)


def export(recipe: Recipe, model: torch.nn.Module, tokenizer: PreTrainedTokenizerFast) -> None:
    """Write the weights as bf16, the configuration and the tokenizer."""
    recipe.output.mkdir(parents=True, exist_ok=True)
    copy = type(model)(model.config)  # pyright: ignore[reportCallIssue]
    copy.load_state_dict(model.state_dict())
    copy.to(torch.bfloat16).save_pretrained(recipe.output, max_shard_size="1GB")  # pyright: ignore[reportCallIssue]
    tokenizer.save_pretrained(recipe.output, save_jinja_files=False)
