"""Corpora: each source gives its documents in order, and what is missing is one sentence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from foregate.collect.corpora import Columns, Document, open_corpus
from foregate.collect.errors import DataError


def test_topics_of_the_standard_library() -> None:
    documents = list(open_corpus("topics"))
    assert len(documents) > 50
    assert documents == list(open_corpus("topics"))
    assert len({document.source for document in documents}) == len(documents)
    assert all(document.source == f"pydoc_data.topics:{document.group}" for document in documents)


def test_paragraphs_of_a_text_file(tmp_path: Path) -> None:
    path = tmp_path / "notes.md"
    path.write_bytes("\ufeffOne\nline two  \n\n \n\tThree \u00e9\r\n\n".encode())
    assert [(document.source, document.text) for document in open_corpus(str(path))] == [
        ("notes.md:0", "One\nline two"),
        ("notes.md:1", "\tThree \u00e9"),
    ]


def test_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    rows = [
        {"text": "one", "topic": 3, "answer": None},
        {"text": " ", "topic": 3, "answer": ""},
        {"text": "x", "topic": 4},
    ]
    path.write_text("\n\n".join(json.dumps(row) for row in rows))
    columns = Columns(category="topic", group="topic")
    assert list(open_corpus(str(path), columns=columns)) == [
        Document(source="a.jsonl:0", text="one", category="3", group="3"),
        Document(source="a.jsonl:2", text="x", category="4", group="4"),
    ]
    with pytest.raises(DataError, match="row 0, has no column 'words'; its columns are text, topic, answer: give one"):
        list(open_corpus(str(path), columns=Columns(text="words")))
    with pytest.raises(DataError, match=r"row 2, has no column 'answer'.*--target-column"):
        list(open_corpus(str(path), columns=Columns(target="answer")))
    with pytest.raises(DataError, match="column 'topic' holds int, expected text"):
        list(open_corpus(str(path), columns=Columns(text="topic")))
    path.write_text('{"text": "one"}\n{"text": ')
    with pytest.raises(DataError, match="line 2, is no JSON"):
        list(open_corpus(str(path)))
    path.write_text("[1]\n")
    with pytest.raises(DataError, match="line 1, is no JSON object"):
        list(open_corpus(str(path)))


def test_tables(tmp_path: Path) -> None:
    tsv, csv = tmp_path / "a.tsv", tmp_path / "a.csv"
    tsv.write_text('text\tlabel\nsay "so\t1\n')
    csv.write_text('text,label\n"one, ""two""",1\n')
    columns = Columns(target="label")
    assert [document.text for document in open_corpus(str(tsv), columns=columns)] == ['say "so']
    assert [(d.text, d.target) for d in open_corpus(str(csv), columns=columns)] == [('one, "two"', "1")]
    for line in ("only one field", "a\tb\tc"):
        tsv.write_text(f"text\tlabel\n{line}\n")
        with pytest.raises(DataError, match="row 0, does not have the header's 2 fields"):
            list(open_corpus(str(tsv)))


def test_files_that_are_missing_or_no_text(tmp_path: Path) -> None:
    for name in (str(tmp_path / "absent"), "./absent", "absent.txt", "absent.parquet", "~/absent"):
        with pytest.raises(DataError, match="does not exist; give --data"):
            open_corpus(name)
    with pytest.raises(DataError, match="is a folder"):
        open_corpus(str(tmp_path))
    path = tmp_path / "a.parquet"
    path.write_bytes(b"PAR1")
    with pytest.raises(DataError, match="neither text nor a table"):
        open_corpus(str(path))
    latin = tmp_path / "latin.txt"
    latin.write_bytes("caf\u00e9".encode("latin-1"))
    with pytest.raises(DataError, match=r"cannot be read .*give a file in UTF-8"):
        list(open_corpus(str(latin)))


@pytest.fixture
def glue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give a folder of local GLUE files, as GLUE was published, named by FOREGATE_DATA."""
    files = {
        "sst2/train.tsv": "sentence\tlabel\nhide new secretions \t0\nthat loves its characters \t1\n",
        "sst2/test.tsv": "index\tsentence\n0\tuneasy mishmash\n",
        "mrpc/dev.tsv": '\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\n1\t3\t4\tHe said " so .\t" He said .\n',
        "rte/train.tsv": "index\tsentence1\tsentence2\tlabel\n0\tA .\tB .\tnot_entailment\n1\tC .\tD .\tentailment\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.setenv("FOREGATE_DATA", str(tmp_path))
    return tmp_path


GLUE_DOCUMENTS = {
    ("sst2", "train"): [
        ("hide new secretions", "sst2 sentence: hide new secretions", " negative"),
        ("that loves its characters", "sst2 sentence: that loves its characters", " positive"),
    ],
    ("sst2", "test"): [("uneasy mishmash", "sst2 sentence: uneasy mishmash", None)],
    ("mrpc", "validation"): [
        ('He said " so . " He said .', 'mrpc sentence1: He said " so . sentence2: " He said .', " equivalent")
    ],
    ("rte", "train"): [
        ("A . B .", "rte sentence1: A . sentence2: B .", " not_entailment"),
        ("C . D .", "rte sentence1: C . sentence2: D .", " entailment"),
    ],
}
HUB_ROWS = {
    ("sst2", "train"): {"sentence": ["hide new secretions ", "that loves its characters "], "label": [0, 1]},
    ("sst2", "test"): {"sentence": ["uneasy mishmash"], "label": [-1]},
    ("mrpc", "validation"): {"sentence1": ['He said " so .'], "sentence2": ['" He said .'], "label": [1]},
    ("rte", "train"): {"sentence1": ["A .", "C ."], "sentence2": ["B .", "D ."], "label": [1, 0]},
}


@pytest.mark.parametrize(("name", "split"), GLUE_DOCUMENTS)
@pytest.mark.parametrize("way", ["local", "hub"])
def test_glue_is_the_same_from_files_and_from_the_hub(glue, monkeypatch, name, split, way) -> None:
    if way == "hub":
        datasets = pytest.importorskip("datasets")
        asked = []

        def load_dataset(*names, split):
            asked.append((*names, split))
            return datasets.Dataset.from_dict(HUB_ROWS[name, split])

        monkeypatch.delenv("FOREGATE_DATA")
        monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    documents = list(open_corpus(f"glue/{name}", split=split))
    assert [(d.text, d.prompt, d.target) for d in documents] == GLUE_DOCUMENTS[name, split]
    assert [d.source for d in documents] == [f"glue/{name}:{split}:{i}" for i in range(len(documents))]
    assert {d.category for d in documents} == {name}
    if way == "hub":
        assert asked == [("nyu-mll/glue", name, split)]
    if split == "validation":
        assert list(open_corpus(f"glue/{name}", split="dev")) == documents or way == "hub"


def test_glue_that_is_missing(glue) -> None:
    with pytest.raises(DataError, match="glue/cola is unknown; give one of glue/sst2, glue/mrpc, glue/rte"):
        open_corpus("glue/cola")
    with pytest.raises(DataError, match="has no split 'trian'; give train, validation or test"):
        open_corpus("glue/sst2", split="trian")
    with pytest.raises(DataError, match=r"mrpc/train\.tsv is missing .*has mrpc/dev\.tsv.*or unset it"):
        list(open_corpus("glue/mrpc"))
    (glue / "sst2/train.tsv").write_text("words\tlabel\na\t1\n")
    with pytest.raises(DataError, match="has no column 'sentence'; its columns are words, label"):
        list(open_corpus("glue/sst2"))
    (glue / "sst2/train.tsv").write_text("sentence\tlabel\na\t7\n")
    with pytest.raises(DataError, match="row 0: label '7' is none of 0, 1"):
        list(open_corpus("glue/sst2"))


def test_real_glue_files(shared, monkeypatch) -> None:
    monkeypatch.setenv("FOREGATE_DATA", str(shared / "data"))
    counts = {("sst2", "train"): 67_349, ("sst2", "dev"): 872, ("mrpc", "dev"): 408, ("rte", "dev"): 277}
    for (name, split), count in counts.items():
        documents = list(open_corpus(f"glue/{name}", split=split))
        assert len(documents) == count
        assert all(document.target for document in documents)


def test_a_hub_that_cannot_be_reached_is_one_sentence(monkeypatch, tmp_path) -> None:
    pytest.importorskip("datasets")
    monkeypatch.delenv("FOREGATE_DATA", raising=False)
    with pytest.raises(DataError, match=r"nyu-mll/glue \(sst2\).*set FOREGATE_DATA to a folder with sst2/train\.tsv"):
        open_corpus("glue/sst2")
    with pytest.raises(DataError, match=r"Data set nobody/nothing .*or give a local file with --data") as raised:
        open_corpus("nobody/nothing")
    assert "\n" not in str(raised.value)


def test_a_hub_data_set(monkeypatch) -> None:
    datasets = pytest.importorskip("datasets")
    features = datasets.Features(
        {
            "body": datasets.Value("string"),
            "label": datasets.ClassLabel(names=["bad", "good"]),
            "n": datasets.Value("int32"),
        }
    )
    rows = datasets.Dataset.from_dict({"body": ["a", "", "b"], "label": [1, 0, -1], "n": [7, 8, 9]}, features=features)

    def load_dataset(name, subset, split):
        if split != "train":
            raise ValueError(f'Unknown split "{split}".\nShould be one of ["train"].')
        return rows

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    columns = Columns(text="body", target="label", group="n")
    assert list(open_corpus("some/set", subset="en", columns=columns)) == [
        Document(source="some/set/en:train:0", text="a", target="good", group="7"),
        Document(source="some/set/en:train:2", text="b", target="-1", group="9"),
    ]
    with pytest.raises(DataError, match="has no column 'text'; its columns are body, label, n"):
        list(open_corpus("some/set"))
    with pytest.raises(DataError, match=r"split 'trian', cannot be loaded .*Unknown split"):
        open_corpus("some/set", split="trian")
