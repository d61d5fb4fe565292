"""Training text of the mini models. Reads local files and splits them by document; knows no tokens and no models.

Held out: the dev sets of SST-2, MRPC and RTE and the last tenth of the WikiText-2 articles. A training line that
stands verbatim among the held-out lines is left out. Never read: the Python documentation topics of the demo.
"""

from __future__ import annotations

import csv
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path

from ...collect.errors import DataError

ARTICLE = re.compile(r"^ = [^=].*[^=] = $")
HELD_OUT_ARTICLES = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class Text:
    """Hold documents and labelled examples of one side of the split."""

    documents: dict[str, list[str]]
    """Plain text by source."""
    sst2: list[tuple[str, int]]
    """Phrase and label, 1 for positive."""
    mrpc: list[tuple[str, str, int]]
    """Two sentences and label, 1 for equivalent."""

    def counts(self) -> dict[str, int]:
        """Count documents by source and labelled examples by task."""
        sizes = {f"{source} documents": len(lines) for source, lines in self.documents.items()}
        return sizes | {"sst2 examples": len(self.sst2), "mrpc examples": len(self.mrpc)}


def data_folder(folder: Path | None) -> Path:
    """Return the folder with the local text: the argument, else FOREGATE_DATA."""
    if folder is None and os.environ.get("FOREGATE_DATA"):
        folder = Path(os.environ["FOREGATE_DATA"])
    if folder is None:
        raise DataError(
            "FOREGATE_DATA is not set, and the mini models are trained on local text: point it, or --data, at a folder"
            " with sst2/, mrpc/, rte/, wikitext-2/ and prompts/."
        )
    if not folder.is_dir():
        raise DataError(
            f"{folder} is no folder: point FOREGATE_DATA, or --data, at one with"
            " sst2/, mrpc/, rte/, wikitext-2/ and prompts/."
        )
    return folder


def read_text(folder: Path, *, max_documents: int | None = None) -> tuple[Text, Text]:
    """Read training and held-out text; max_documents cuts each source, for a smoke run."""
    articles = _articles(_file(folder, "wikitext-2/wiki.valid.tokens"))
    cut = len(articles) - max(1, round(HELD_OUT_ARTICLES * len(articles)))
    held_out = _side(folder, "dev", articles[cut:], [], max_documents)
    seen = {line for lines in held_out.documents.values() for line in lines}
    train = _side(folder, "train", articles[:cut], _prompts(_file(folder, "prompts/seed_tasks.jsonl")), max_documents)
    documents = {source: [line for line in lines if line not in seen] for source, lines in train.documents.items()}
    sst2 = [example for example in train.sst2 if example[0] not in seen]
    mrpc = [example for example in train.mrpc if example[0] not in seen and example[1] not in seen]
    return Text(documents=documents, sst2=sst2, mrpc=mrpc), held_out


def _side(folder: Path, split: str, articles: list[str], prompts: list[str], cut: int | None) -> Text:
    sst2 = [(row["sentence"].strip(), int(row["label"])) for row in _rows(folder, f"sst2/{split}.tsv")][:cut]
    mrpc = [
        (row["#1 String"].strip(), row["#2 String"].strip(), int(row["Quality"]))
        for row in _rows(folder, f"mrpc/{split}.tsv")
    ][:cut]
    rte = [(row["sentence1"].strip(), row["sentence2"].strip()) for row in _rows(folder, f"rte/{split}.tsv")][:cut]
    documents = {
        "sst2": longest_phrases([sentence for sentence, _ in sst2]),
        "mrpc": list(dict.fromkeys(sentence for first, second, _ in mrpc for sentence in (first, second))),
        "rte": list(dict.fromkeys(f"{first} {second}" for first, second in rte)),
        "wikitext-2": articles[:cut],
        "prompts": prompts[:cut],
    }
    return Text(documents={source: lines for source, lines in documents.items() if lines}, sst2=sst2, mrpc=mrpc)


def longest_phrases(phrases: list[str]) -> list[str]:
    """Leave out each phrase that is part of a longer one: SST-2 lists most sentences with all their sub-trees."""
    kept: list[str] = []
    spans: set[int] = set()
    for phrase in sorted(dict.fromkeys(phrases), key=len, reverse=True):
        words = phrase.split()
        if hash(tuple(words)) in spans:
            continue
        kept.append(phrase)
        spans.update(hash(tuple(words[a:b])) for a in range(len(words)) for b in range(a + 1, len(words) + 1))
    return kept


def _file(folder: Path, name: str) -> Path:
    path = folder / name
    if not path.is_file():
        raise DataError(
            f"{path} is missing: the data folder needs it, so add the file or point FOREGATE_DATA elsewhere."
        )
    return path


def _rows(folder: Path, name: str) -> list[dict[str, str]]:
    with _file(folder, name).open(encoding="utf-8-sig", newline="") as lines:
        return list(csv.DictReader(lines, delimiter="\t", quoting=csv.QUOTE_NONE))


def _prompts(path: Path) -> list[str]:
    tasks = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    return [
        "\n".join(part for part in (task["instruction"], case["input"], case["output"]) if part)
        for task in tasks
        for case in task["instances"][:1]
    ]


def _articles(path: Path) -> list[str]:
    articles: list[list[str]] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if ARTICLE.match(line):
            articles.append([])
        if articles and line.strip():
            articles[-1].append(line.strip())
    if len(articles) < 2:
        raise DataError(f"{path} has {len(articles)} articles: at least 2 are needed, one of them held out.")
    return ["\n".join(lines) for lines in articles]
