"""The texts of a model's token ids: from a tokenizer, a list in JSON, or the list that stands beside an .npz trace.

Knows tokenizers and files; knows nothing of routing.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

from .errors import DataError, ModelError

SIDECAR = ".vocab.json.gz"  # beside NAME.npz: a list whose place i holds the text of id i
MOST_BYTES = 256 << 20  # of JSON, unpacked; a vocabulary of 256,000 tokens has about 4 MiB


def texts_beside(trace: Path) -> Path | None:
    """Give the list that stands beside an .npz trace, None where there is none."""
    path = trace.with_name(trace.stem + SIDECAR)
    return path if trace.suffix == ".npz" and path.is_file() else None


def read_token_texts(source: str | Path) -> tuple[str, ...]:
    """Read the text of every token id from 0 on.

    Args:
        source: a .json or .json.gz file that holds a list of texts or an object from text to id (a tokenizer's
            vocab.json), or what transformers loads a tokenizer from: a folder or a name on the hub.

    Raises:
        DataError: if the file is not such a list.
        ModelError: if transformers finds no tokenizer.
    """
    path = Path(source)
    if not path.is_file():
        return _of_tokenizer(str(source))
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
        value = json.loads(content) if len(content) <= MOST_BYTES else None
    except (OSError, EOFError, ValueError) as error:
        raise DataError(
            f"{path} holds no token texts ({error}); give a JSON list of texts, a vocab.json or a tokenizer."
        ) from error
    return _checked(value, path)


def _checked(value: Any, path: Path) -> tuple[str, ...]:
    if isinstance(value, list) and value and all(isinstance(text, str) for text in value):
        return tuple(value)
    if isinstance(value, dict) and value and all(isinstance(id, int) and 0 <= id < 1 << 24 for id in value.values()):
        return _by_id(value)
    raise DataError(
        f"{path} holds no token texts: a JSON list of texts or an object from text to id is wanted, of at most "
        f"{MOST_BYTES >> 20} MiB."
    )


def _of_tokenizer(name: str) -> tuple[str, ...]:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except Exception as error:  # transformers raises many kinds for one cause
        reason = str(error).strip().splitlines()[:1]
        raise ModelError(
            f"There is no tokenizer {name} ({''.join(reason)}); give a model folder, a name on the hub, or a JSON list "
            "of token texts."
        ) from error
    return _by_id(tokenizer.get_vocab())


def _by_id(ids: dict[str, int]) -> tuple[str, ...]:
    texts = [""] * (1 + max(ids.values()))
    for text, place in ids.items():
        texts[place] = text
    return tuple(texts)
