"""From documents to padded batches: pieces of at most so many tokens, in an order that a resumed run repeats.

Knows tokenizers and arrays; knows no models or files. A window of several batches is sorted by length, so that little
of a batch is padding; the windows and the batches in them depend on nothing but the corpus and the settings.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, Literal, NamedTuple

import numpy as np

from .config import Overflow
from .corpora import Document
from .errors import ModelError

Side = Literal["left", "right"]
WINDOW_BATCHES = 16  # sorted together: SST-2 batches of 8 are then 4 % padding in place of 45 %


class Piece(NamedTuple):
    """Hold the tokens of one sequence to record."""

    sequence: str
    """Id in the trace."""
    token_ids: list[int]
    target_ids: list[int] | None
    """Tokens of the target text, of a document that has one."""
    document: Document
    group: str | None
    """The document's group, or the document itself where it became several pieces."""


def pieces_of(
    documents: Iterable[Document],
    tokenizer: Any,
    *,
    max_tokens: int,
    overflow: Overflow,
    text_to_text: bool,
    vocab_size: int,
) -> Iterator[Piece]:
    """Cut documents into pieces; those without tokens are left out.

    Args:
        documents: of a corpus.
        tokenizer: of the model.
        max_tokens: most tokens of a piece, special tokens included.
        overflow: split a longer document into several pieces, or cut it off.
        text_to_text: use the documents' prompts and targets.
        vocab_size: rows of the model's embedding.

    Raises:
        ModelError: if the tokenizer gives ids that the model has no embedding for.
    """
    for document in documents:
        text = document.prompt or document.text if text_to_text else document.text
        pieces = _encode(tokenizer, text, max_tokens, overflow)
        target_ids = None
        if text_to_text and document.target is not None:
            target_ids = _encode(tokenizer, document.target, max_tokens, "cut")[0]
        highest = max((max(ids, default=0) for ids in (*pieces, target_ids or [])), default=0)
        if highest >= vocab_size:
            raise ModelError(
                f"The tokenizer gave id {highest} for {document.source}, the model embeds ids 0..{vocab_size - 1}; "
                "load the model's own tokenizer."
            )
        several = len(pieces) > 1
        for number, ids in enumerate(pieces):
            if ids:
                sequence = f"{document.source}#{number}" if several else document.source
                group = document.group or (document.source if several else None)
                yield Piece(sequence, ids, target_ids, document, group)


def batches_of(pieces: Iterable[Piece], batch_size: int) -> Iterator[list[list[tuple[int, Piece]]]]:
    """Yield windows, each a list of batches of (place in the corpus, piece) whose pieces have similar lengths."""
    stream = enumerate(pieces)
    while window := list(islice(stream, batch_size * WINDOW_BATCHES)):
        window.sort(key=lambda item: len(item[1].token_ids))  # stable: equal lengths stay in order
        yield [window[start : start + batch_size] for start in range(0, len(window), batch_size)]


def pad(sequences: Sequence[Sequence[int]], pad_id: int, side: Side) -> tuple[np.ndarray, np.ndarray]:
    """Pad token ids to int64 [B, T], with the mask bool [B, T] that is True on tokens."""
    longest = max(map(len, sequences))
    ids = np.full((len(sequences), longest), pad_id, np.int64)
    mask = np.zeros(ids.shape, bool)
    for row, sequence in enumerate(sequences):
        place = slice(longest - len(sequence), longest) if side == "left" else slice(0, len(sequence))
        ids[row, place], mask[row, place] = sequence, True
    return ids, mask


def _encode(tokenizer: Any, text: str, max_tokens: int, overflow: Overflow) -> list[list[int]]:
    if overflow == "cut":
        return [tokenizer(text, truncation=True, max_length=max_tokens)["input_ids"]]
    if tokenizer.is_fast:  # each piece gets its special tokens
        options = {"truncation": True, "max_length": max_tokens, "return_overflowing_tokens": True}
        return tokenizer(text, **options)["input_ids"]
    ids = tokenizer(text, verbose=False)["input_ids"]
    return [ids[start : start + max_tokens] for start in range(0, len(ids), max_tokens)] or [[]]
