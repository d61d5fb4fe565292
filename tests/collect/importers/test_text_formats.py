"""CSV files, printed tensors and JSON lines of problems, with the defects that they come with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from foregate.collect.errors import SettingError, TraceError
from foregate.collect.trace import Trace
from foregate.runtime import models

Import = Callable[..., Any]
Write = Callable[..., Path]

HEAD = "Layer ID,Batch Number,Token,Activated Expert IDs\n"
TABLE = HEAD + '1,0,a,"[8, 2]"\n1,0,b,"[0, 5]"\n2,0,a,"[1, 2]"\n2,0,b,"[3, 4]"\n'


def test_a_csv_prompt_is_a_sequence(imported: Import, write: Write) -> None:
    got = imported(write("p.csv", TABLE.replace("\n", "\r\n")))
    assert got.rows["p:0"].experts.tolist() == [[8, 2, 1, 2], [0, 5, 3, 4]]
    assert [layer.block for layer in Trace.open(got.result.out).topology.layers] == [1, 2]
    again = imported(write("q.csv", TABLE), blocks=[0, 1], experts=16)
    assert [layer.block for layer in Trace.open(again.result.out).topology.layers] == [0, 1]
    with pytest.raises(SettingError, match="blocks names 3 blocks"):
        imported(write("r.csv", TABLE), blocks=[0, 1, 2])


def test_csv_tokens_become_ids_with_a_tokenizer(imported: Import, write: Write) -> None:
    from transformers import AutoTokenizer

    folder = str(models.path("foregate-mini"))
    vocabulary = AutoTokenizer.from_pretrained(folder).get_vocab()
    got = imported(write("p.csv", TABLE), tokenizer=folder)
    assert got.rows["p:0"].token_ids.tolist() == [vocabulary["a"], vocabulary["b"]]
    assert Trace.open(got.result.out).header.tokenizer_fingerprint
    with pytest.raises(TraceError, match="row 2: the tokenizer has no token 'nonesuch'"):
        imported(write("q.csv", TABLE.replace(",b,", ",nonesuch,")), tokenizer=folder)
    with pytest.raises(SettingError, match="tokenizer 'nowhere/at-all' cannot be loaded"):
        imported(write("r.csv", TABLE), tokenizer="nowhere/at-all")


def test_csv_rows_cut_at_the_end_are_dropped(imported: Import, write: Write) -> None:
    got = imported(write("p.csv", TABLE[:-4]))  # inside the list of the last row
    assert (got.result.report.rows_read, got.dropped) == (4, {"cut_line": 1, "incomplete_token": 1})
    assert got.rows["p:0"].experts.tolist() == [[8, 2, 1, 2]]
    got = imported(write("q.csv", TABLE[: TABLE.index("2,0,b") + 5]))  # before the list
    assert got.dropped == {"cut_line": 1, "incomplete_token": 1}


CSV_REFUSED = {
    "another token in a layer": (
        TABLE.replace("2,0,b", "2,0,c"),
        "row 4: token 1 is 'c' in layer 2 and 'b' in layer 1",
    ),
    "a row twice": (TABLE + '2,0,b,"[3, 4]"\n', None),
    "a short row": (TABLE.replace("1,0,b,", "1,0,"), "row 2: it is no layer, batch, token and list"),
    "a layer beyond all numbers": (TABLE.replace("1,0,b", "9" * 5000 + ",0,b"), "row 2: it is no layer"),
    "a layer below 0": (TABLE.replace("1,0,b", "-1,0,b"), "row 2: it is no layer"),
    "no list": (TABLE.replace("[0, 5]", "zero"), "row 2: it is no layer"),
    "top-k changes": (TABLE.replace("[0, 5]", "[0]"), "row 2: it has 1 experts where top-2"),
    "nothing but the head": (HEAD, "holds no rows"),
    "quotes that do not close": (TABLE.replace('5]"', "5]") + "x,\n", None),
}


@pytest.mark.parametrize("name", CSV_REFUSED)
def test_csv_contradictions(name: str, imported: Import, write: Write) -> None:
    content, message = CSV_REFUSED[name]
    if name == "a row twice":
        assert imported(write("p.csv", content)).dropped == {"incomplete_token": 1}  # the layers end apart
        return
    with pytest.raises(TraceError, match=message):
        imported(write("p.csv", content))


def statement(layer: int, ids: str, tokens: str) -> str:
    """Print one layer as the tool does."""
    return f"input_ids: tensor([[{tokens}]], device='dev') \nLayer {layer} topk_ids: tensor({ids}, dtype=torch.int32)\n"


PREFILL = statement(0, "[[0, 1],\n        [2, 3]]", "7,\n   8") + statement(1, "[[4, 5],\n        [5, 4]]", "7, 8")
DECODE = statement(0, "[[1, 0]]", "9") + statement(1, "[[3, 5]]", "9")


def test_a_prefill_starts_a_sequence_and_single_tokens_go_on(imported: Import, write: Write) -> None:
    got = imported(write("t.txt.gz", PREFILL + DECODE + DECODE + PREFILL + DECODE))
    assert {name: (row.num_tokens, row.prompt_tokens) for name, row in got.rows.items()} == {
        "t:0": (4, 2),
        "t:1": (3, 2),
    }
    assert got.rows["t:0"].experts.tolist() == [[0, 1, 4, 5], [2, 3, 5, 4], [1, 0, 3, 5], [1, 0, 3, 5]]
    assert got.rows["t:0"].token_ids.tolist() == [7, 8, 9, 9]
    assert got.result.report.rows_read == 14


def test_forwards_that_lack_a_layer_are_dropped_and_end_their_sequence(imported: Import, write: Write) -> None:
    lacking = statement(0, "[[1, 0]]", "6")
    got = imported(write("t.txt", PREFILL + lacking + DECODE + lacking))
    assert got.dropped == {"incomplete_forward": 2}
    assert {name: (row.num_tokens, row.prompt_tokens) for name, row in got.rows.items()} == {
        "t:0": (2, 2),
        "t:1": (1, None),  # what follows the missing token is no neighbour of what precedes it
    }


def test_a_statement_cut_at_the_end_is_dropped(imported: Import, write: Write) -> None:
    got = imported(write("t.txt", (PREFILL + DECODE)[:-20]))
    assert (got.result.report.rows_read, got.dropped) == (6, {"cut_line": 1, "incomplete_forward": 1})


TEXT_REFUSED = {
    "an ellipsis": (statement(0, "[[0, 1],\n        ...,\n        [2, 3]]", "7, 8"), "line 2: .* printed with '...'"),
    "tokens and rows that differ": (statement(0, "[[0, 1]]", "7, 8"), "line 2: layer 0 has 1 rows for 2 token ids"),
    "other tokens in a layer": (
        PREFILL + statement(0, "[[1, 0]]", "9") + statement(1, "[[3, 5]]", "8"),
        "other token ids",
    ),
    "a batch of two": (PREFILL.replace("[[7,\n   8]]", "[[7], [8]]"), "must be a batch of one sequence, got 2"),
    "floats": (statement(0, "[[0.5, 1.]]", "7"), "the tensor is not of integers"),
    "no token ids": ("Layer 0 topk_ids: tensor([[0, 1]])\n", "expected 'Layer N topk_ids' behind input_ids"),
    "other words": (PREFILL + "done\n", "expected 'LABEL: tensor"),
    "top-k changes": (PREFILL + statement(0, "[[1, 0, 2]]", "9"), "it has 3 experts where top-2"),
    "one dimension": (PREFILL + statement(0, "[1]", "9"), "must be a list of integers"),
}


@pytest.mark.parametrize("name", TEXT_REFUSED)
def test_printed_contradictions(name: str, imported: Import, write: Write) -> None:
    content, message = TEXT_REFUSED[name]
    with pytest.raises(TraceError, match=message):
        imported(write("t.txt", content), format="mixtral-text")


def cell(token: int, layer: int, ids: list[int], problem: Any = 0, **values: Any) -> dict[str, Any]:
    """Make one line of a problem."""
    return {"dataset": "d", "problem_id": problem, "layer": layer, "experts": ids, "token_idx": token, **values}


PROBLEM = [cell(token, layer, [token, layer + 4]) for layer in (0, 1) for token in range(4)]


def test_tokens_that_lack_a_layer_are_dropped_and_divide_a_problem(imported: Import, write: Write) -> None:
    lines = [line for line in PROBLEM if (line["token_idx"], line["layer"]) != (1, 1)]
    got = imported(write("s.jsonl", lines))
    assert (got.result.report.rows_read, got.dropped) == (7, {"incomplete_token": 1})
    assert {name: row.experts.tolist() for name, row in got.rows.items()} == {
        "s:0": [[0, 4, 0, 5]],
        "s:0~2": [[2, 4, 2, 5], [3, 4, 3, 5]],
    }
    assert got.rows["s:0"].category == "d"
    assert not any("calls were missed" in note.sentence for note in got.result.report.notes)


def test_counters_that_end_apart_are_said(imported: Import, write: Write) -> None:
    got = imported(write("s.jsonl", PROBLEM[:-1]))
    assert got.dropped == {"incomplete_token": 1}
    assert any(
        "hold 3 to 4 (layer 1 has the fewest): calls were missed" in note.sentence for note in got.result.report.notes
    )


def test_problems_repeated_lines_and_cut_lines(imported: Import, write: Write) -> None:
    other = [{**line, "problem_id": "b"} for line in PROBLEM]
    got = imported(write("s.jsonl", [*PROBLEM, PROBLEM[3], *other]))
    assert (list(got.rows), got.dropped) == (["s:0", "s:b"], {"duplicate": 1})
    whole = write("t.jsonl", [*PROBLEM, *other]).read_text(encoding="utf-8")
    assert imported(write("u.jsonl", whole[:-9])).dropped == {"cut_line": 1, "incomplete_token": 1}
    with pytest.raises(TraceError, match="line 17: problem 0 stands in two places"):
        imported(write("v.jsonl", [*PROBLEM, *other, PROBLEM[0]]))
    with pytest.raises(TraceError, match=r"line 9: token 0 of layer 0 stands twice, with \[0, 4\] and with \[1, 4\]"):
        imported(write("w.jsonl", [*PROBLEM, cell(0, 0, [1, 4])]))
    with pytest.raises(TraceError, match="line 2: it must have layer and token_idx of 0 or more"):
        imported(write("x.jsonl", [PROBLEM[0], cell(-1, 0, [1, 2])]))
    with pytest.raises(TraceError, match="problem 0: its token_idx runs to 1099511627776, with 5 tokens"):
        imported(write("z.jsonl", [*PROBLEM, cell(2**40, 0, [1, 4])]))
    with pytest.raises(TraceError, match="its problem_id must be a number or a string"):
        imported(write("y.jsonl", [PROBLEM[0], cell(1, 0, [1, 2], problem=[1])]))


def test_weights_are_normalized_only_where_all_sum_to_one(imported: Import, write: Write) -> None:
    for name, probs, kind in (("a", [0.75, 0.25], "normalized"), ("b", [0.5, 0.25], "unit"), ("c", [3, -1], "finite")):
        got = imported(write(f"{name}.jsonl", [{**line, "gating_probs": probs} for line in PROBLEM]))
        assert Trace.open(got.result.out).header.weights == kind
        assert got.rows[f"{name}:0"].weights[0].tolist() == probs * 2


def test_formats_are_not_mixed(imported: Import, write: Write) -> None:
    write("mixed/p.csv", TABLE)
    folder = write("mixed/s.jsonl", PROBLEM).parent
    with pytest.raises(
        TraceError, match=r"several formats, p.csv \(moe-beyond-csv\), s.jsonl \(speculative-moe-jsonl\)"
    ):
        imported(folder)
    got = imported(folder, format="moe-beyond-csv")
    assert any("s.jsonl" in note.sentence for note in got.result.report.notes)
    with pytest.raises(TraceError, match="holds no file of npz"):
        imported(folder, format="npz")
    with pytest.raises(SettingError, match="format must be one of"):
        imported(folder, format="nonesuch")


def test_a_source_that_is_not_there_or_empty(imported: Import, tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="does not exist"):
        imported(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(TraceError, match="holds no files"):
        imported(tmp_path / "empty")
