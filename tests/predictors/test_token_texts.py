"""Embeddings from texts: what is spelt alike is embedded alike, and unseen ids get a row of their own."""

from __future__ import annotations

import numpy as np
import torch
from foregate.predictors.rows import RoutingStatistics
from foregate.predictors.token_embedding import BY_TEXT, TokenEmbedding
from foregate.predictors.token_texts import embed_texts, features_of

STEMS = ("walk", "talk", "jump", "play", "look", "call", "open", "turn", "help", "work")
WORDS = tuple(f" {stem}{end}" for stem in STEMS for end in ("ing", "ed", "s"))
TEXTS = (*WORDS, "1", "22", "333", "4", "55")


def wanted() -> np.ndarray:
    """Give embeddings that follow from a text's ending."""
    kinds = [0 if t.endswith("ing") else 1 if t.endswith("ed") else 2 if t[0] == " " else 3 for t in TEXTS]
    return np.eye(4, dtype=np.float32)[kinds]


def test_features_tell_spaces_shapes_and_parts():
    assert "ing>" in features_of(" walking")
    assert "_wa" in features_of("\u0120Walking")
    assert "<wa" in features_of("walking")
    assert "shape Ull" in features_of("Abc")
    assert features_of("") == ["<", ">", "<>", "shape ", "first  False"]


def test_unseen_texts_are_embedded_like_those_that_end_alike():
    embedding, seen = wanted(), np.array([i for i in range(len(TEXTS)) if i % 7])
    unseen = np.array([i for i in range(len(TEXTS)) if i % 7 == 0])
    found = embed_texts(TEXTS, seen, embedding[seen], np.full(len(seen), 50.0, np.float32))
    assert (found.of_all[unseen].argmax(1) == embedding[unseen].argmax(1)).all()
    assert (found.of_seen.argmax(1) == embedding[seen].argmax(1)).mean() > 0.9


def test_seen_ids_are_embedded_from_others_alone():
    """A seen id's row does not change with its own embedding, as an unseen id's cannot."""
    embedding, seen = wanted(), np.arange(len(TEXTS))
    counts = np.full(len(seen), 50.0, np.float32)
    other = embedding.copy()
    other[0] = 9
    found, changed = embed_texts(TEXTS, seen, embedding, counts), embed_texts(TEXTS, seen, other, counts)
    np.testing.assert_allclose(changed.of_seen[0], found.of_seen[0], atol=1e-5)
    assert np.abs(changed.of_seen[3] - found.of_seen[3]).max() > 0.01


def test_ids_beyond_the_texts_and_no_seen_ids():
    found = embed_texts(TEXTS, np.array([1, 99]), np.ones((2, 3), np.float32), np.ones(2, np.float32))
    assert found.of_seen.shape == (2, 3)
    assert not found.of_seen[1].any()
    none = embed_texts(TEXTS, np.zeros(0, np.int64), np.zeros((0, 3), np.float32), np.zeros(0, np.float32))
    assert none.of_all.shape == (len(TEXTS), 3)
    assert not none.of_all.any()


def test_an_embedding_knows_ids_by_their_texts():
    embedding, seen = wanted(), np.array([i for i in range(len(TEXTS)) if i % 7])
    statistics = RoutingStatistics(
        popularity_LE=np.zeros((1, 4), np.float32),
        token_ids=seen,
        counts_S=np.full(len(seen), 50.0, np.float32),
        uses_SLE=np.zeros((len(seen), 1, 4), np.float32),
        texts=TEXTS,
    )
    made = TokenEmbedding(60, np.arange(len(TEXTS)), 4)
    made.start(statistics, torch.from_numpy(embedding[seen]))
    with torch.no_grad():
        torch.testing.assert_close(made(torch.from_numpy(seen)), torch.from_numpy(embedding[seen]))
        assert made(torch.tensor([0, 7, 14])).argmax(1).tolist() == embedding[[0, 7, 14]].argmax(1).tolist()
        assert not made(torch.tensor([-1, 50, 10**9])).any()  # the unknown row
        torch.manual_seed(0)
        many = torch.full((4000,), int(seen[0]))
        forgotten = made(many, forget=0.5)
        by_text = (forgotten == made.spelt[made.rows[seen[0]]]).all(-1).float().mean()
        unknown = (~forgotten.any(-1)).float().mean()
        assert abs(by_text - 0.5 * BY_TEXT) < 0.03
        assert abs(unknown - 0.5 * (1 - BY_TEXT)) < 0.03
