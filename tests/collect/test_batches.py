"""Pieces and batches: nothing is lost, padding is small, and the order depends on the corpus alone."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
from foregate.collect import tiny_models
from foregate.collect.batches import Piece, batches_of, pad, pieces_of
from foregate.collect.corpora import Document
from hypothesis import given
from hypothesis import strategies as st

WORDS = Document(source="a", text="abcdefgh", prompt="task: ab", target="yes")


def pieces(tokenizer, document=WORDS, **settings) -> list[Piece]:
    given = {"max_tokens": 5, "overflow": "split", "text_to_text": False, "vocab_size": 320, **settings}
    return list(pieces_of([document], tokenizer, **given))


def test_split_and_cut() -> None:
    tokenizer = tiny_models.tokenizer(add_eos=True)
    split = pieces(tokenizer)
    assert [tokenizer.decode(piece.token_ids) for piece in split] == ["abcd</s>", "efgh</s>"]
    assert [(piece.sequence, piece.group, piece.target_ids) for piece in split] == [
        ("a#0", "a", None),
        ("a#1", "a", None),
    ]
    (cut,) = pieces(tokenizer, overflow="cut")
    assert (tokenizer.decode(cut.token_ids), cut.sequence, cut.group) == ("abcd</s>", "a", None)


def test_text_to_text_uses_prompt_and_target() -> None:
    tokenizer = tiny_models.tokenizer(add_eos=True)
    (piece,) = pieces(tokenizer, max_tokens=20, text_to_text=True)
    assert tokenizer.decode(piece.token_ids) == "task: ab</s>"
    assert tokenizer.decode(piece.target_ids) == "yes</s>"


def test_a_tokenizer_in_python_alone() -> None:
    def call(text: str, **options: object) -> dict[str, list[int]]:
        ids = [ord(letter) for letter in text]
        return {"input_ids": ids[: options["max_length"]] if options.get("truncation") else ids}  # type: ignore[misc]

    class Slow(SimpleNamespace):
        is_fast = False
        __call__ = staticmethod(call)

    assert [len(piece.token_ids) for piece in pieces(Slow(), max_tokens=3)] == [3, 3, 2]
    assert [len(piece.token_ids) for piece in pieces(Slow(), max_tokens=3, overflow="cut")] == [3]
    assert pieces(Slow(), document=Document(source="a", text="")) == []


@given(lengths=st.lists(st.integers(1, 50), max_size=200), batch_size=st.integers(1, 5))
def test_batches_hold_every_piece_once(lengths: list[int], batch_size: int) -> None:
    stream = [Piece(str(i), [7] * length, None, WORDS, None) for i, length in enumerate(lengths)]
    windows = list(batches_of(stream, batch_size))
    for window in windows:
        places = sorted(place for batch in window for place, _ in batch)
        assert places == list(range(places[0], places[0] + len(places)))  # a window is a stretch of the corpus
        ordered = [len(piece.token_ids) for batch in window for _, piece in batch]
        assert ordered == sorted(ordered)
        assert all(0 < len(batch) <= batch_size for batch in window)
    flat = sorted((place, piece.sequence) for window in windows for batch in window for place, piece in batch)
    assert flat == [(i, str(i)) for i in range(len(lengths))]
    assert windows == list(batches_of(stream, batch_size))


@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=5), side=st.sampled_from(["left", "right"]))
def test_padding_is_undone_by_the_mask(lengths: list[int], side) -> None:
    sequences = [list(range(1, length + 1)) for length in lengths]
    ids, mask = pad(sequences, 0, side)
    assert ids.shape == mask.shape == (len(lengths), max(lengths))
    assert [row[kept].tolist() for row, kept in zip(ids, mask, strict=True)] == sequences
    assert (ids[~mask] == 0).all()
    if side == "left":
        assert mask[:, -1].all()
    assert mask.dtype == np.bool_
