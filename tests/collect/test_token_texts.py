"""Token texts from lists, vocabularies and tokenizers; and what is none of them."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from foregate.collect import token_texts
from foregate.collect.errors import DataError, ModelError
from foregate.collect.tiny_models.tokenizer import tokenizer
from foregate.collect.token_texts import read_token_texts, texts_beside


def test_a_list_plain_and_packed(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('["x", " y"]')
    with gzip.open(tmp_path / "b.json.gz", "wt") as file:
        file.write('["x", " y"]')
    assert read_token_texts(tmp_path / "a.json") == read_token_texts(tmp_path / "b.json.gz") == ("x", " y")


def test_a_vocabulary_with_gaps(tmp_path: Path) -> None:
    (tmp_path / "vocab.json").write_text('{"b": 3, "a": 0}')
    assert read_token_texts(tmp_path / "vocab.json") == ("a", "", "", "b")


def test_a_tokenizer(tmp_path: Path) -> None:
    tokenizer().save_pretrained(tmp_path)
    texts = read_token_texts(tmp_path)
    assert len(texts) >= 256
    assert "a" in texts


@pytest.mark.parametrize("value", [[], [1, 2], {}, {"a": "b"}, {"a": -1}, {"a": 1 << 40}, 3, None])
def test_what_is_no_list_of_texts_is_refused(value: object, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps(value))
    with pytest.raises(DataError, match="a JSON list of texts"):
        read_token_texts(path)


def test_damaged_and_boundless_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.json.gz").write_bytes(b"no gzip")
    with pytest.raises(DataError, match="holds no token texts"):
        read_token_texts(tmp_path / "a.json.gz")
    with gzip.open(tmp_path / "cut.json.gz", "wb") as file:
        file.write(b'["x"]' * 1000)
    whole = (tmp_path / "cut.json.gz").read_bytes()
    (tmp_path / "cut.json.gz").write_bytes(whole[:-9])
    with pytest.raises(DataError, match="holds no token texts"):
        read_token_texts(tmp_path / "cut.json.gz")
    monkeypatch.setattr(token_texts, "MOST_BYTES", 4)
    (tmp_path / "b.json").write_text('["many", "texts"]')
    with pytest.raises(DataError, match="no token texts"):
        read_token_texts(tmp_path / "b.json")


def test_no_tokenizer_is_said(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no tokenizer"):
        read_token_texts(tmp_path)


def test_the_list_beside_a_trace(tmp_path: Path) -> None:
    assert texts_beside(tmp_path / "a.npz") is None
    (tmp_path / "a.vocab.json.gz").write_bytes(b"")
    assert texts_beside(tmp_path / "a.npz") == tmp_path / "a.vocab.json.gz"
    assert texts_beside(tmp_path / "a") is None
