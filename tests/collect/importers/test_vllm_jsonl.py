"""Logs of vLLM patches: warm-ups, restarts, gaps, repeated rows, cut lines, contradicting meta lines."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from foregate.collect.errors import TraceError
from foregate.collect.trace import Trace

Import = Callable[..., Any]
Write = Callable[..., Path]

META = {"type": "meta", "model_id": "m", "vllm_version": "0.16", "layers_logged": [3], "top_k": 2}


def route(token: int, ids: list[int], layer: int = 3, **values: Any) -> dict[str, Any]:
    """Make one row."""
    return {"type": "route", "req_id": "r1", "token_idx": token, "layer": layer, "topk_ids": ids, **values}


def forward(*choices: list[int], layer: int = 3) -> list[dict[str, Any]]:
    """Make one forward's rows."""
    return [route(token, ids, layer) for token, ids in enumerate(choices)]


DUMMY = forward(*[[4, 1]] * 40)
TEXT = forward([0, 1], [2, 3], [1, 5])


def test_a_restart_of_token_idx_is_a_new_forward(imported: Import, write: Write) -> None:
    got = imported(write("a.jsonl", [META, *TEXT, *forward([5, 0]), *forward([0, 5])]))
    assert {name: row.experts.tolist() for name, row in got.rows.items()} == {
        "a:0": [[0, 1], [2, 3], [1, 5]],
        "a:1": [[5, 0]],
        "a:2": [[0, 5]],
    }
    assert Trace.open(got.result.out).topology.layers[0].block == 3


def test_warm_ups_are_dropped_wherever_they_stand(imported: Import, write: Write) -> None:
    short = forward(*[[4, 1]] * 8)  # the dummy token in a smaller batch, as when graphs are captured
    alike = forward(*[[2, 1]] * 8)  # eight requests that agree are no warm-up
    got = imported(write("a.jsonl", [META, *DUMMY, *short, *TEXT, *alike, *DUMMY, *TEXT]))
    assert got.dropped == {"warm_up": 40 + 8 + 40}
    assert list(got.rows) == ["a:2", "a:3", "a:5"]


def test_only_a_warm_up_is_no_trace(imported: Import, write: Write) -> None:
    with pytest.raises(TraceError, match="40 were read, 40 warm_up dropped"):
        imported(write("a.jsonl", [META, *DUMMY]))


def test_repeated_rows_are_dropped_and_contradicting_ones_refused(imported: Import, write: Write) -> None:
    got = imported(write("a.jsonl", [META, *TEXT[:2], TEXT[1], TEXT[2]]))
    assert got.dropped == {"duplicate": 1}
    assert got.rows["a:0"].num_tokens == 3
    with pytest.raises(TraceError, match=r"b.jsonl, line 4: token 1 stands twice, with \[2, 3\] and with \[2, 4\]"):
        imported(write("b.jsonl", [META, *TEXT[:2], route(1, [2, 4])]))


def test_forwards_with_gaps_are_dropped(imported: Import, write: Write) -> None:
    skipping = [route(0, [0, 1]), route(2, [0, 1])]
    headless = [route(7, [0, 1]), route(8, [2, 1])]
    got = imported(write("a.jsonl", [META, *headless, *skipping, *TEXT]))
    assert got.dropped == {"gap": 4}
    assert list(got.rows) == ["a:2"]


def test_layers_of_one_run_are_joined_and_incomplete_forwards_dropped(imported: Import, write: Write) -> None:
    both = [*forward([0, 1], [2, 3]), *forward([4, 5], [5, 4], layer=6)]
    lacking = forward([0, 1], [1, 2])
    shorter = [*forward([0, 1], [1, 2]), *forward([0, 1], layer=6)]
    got = imported(write("a.jsonl", [{**META, "layers_logged": [3, 6]}, *both, *lacking, *shorter]))
    assert got.rows["a:0"].experts.tolist() == [[0, 1, 4, 5], [2, 3, 5, 4]]
    assert got.dropped == {"incomplete_forward": 2 + 3}
    assert [layer.block for layer in Trace.open(got.result.out).topology.layers] == [3, 6]


def test_files_of_one_layer_are_runs_of_one_trace(imported: Import, write: Write) -> None:
    write("runs/a.jsonl", [META, *TEXT])
    write("runs/b.jsonl.gz", [META, *TEXT])
    (write("runs/README.md", "words") and None)
    got = imported(write("runs/c.jsonl", [META, *TEXT]).parent)
    assert (got.result.format, list(got.rows)) == ("vllm-jsonl", ["a:0", "b:0", "c:0"])
    assert any("README.md" in note.sentence for note in got.result.report.notes)


def kinds(path: Path) -> list[str]:
    return [note.kind for note in Trace.open(path).header.notes if note.kind != "remark"]


def test_the_trace_says_that_rows_and_runs_are_apart(imported: Import, write: Write) -> None:
    write("runs/a.jsonl", [META, *TEXT])
    runs = write("runs/b.jsonl", [{**META, "layers_logged": [6]}, *forward([0, 1], layer=6)]).parent
    got = imported(runs)
    assert got.result.format == "vllm-jsonl-by-layer"
    assert kinds(got.result.out) == ["tokens_apart", "layers_apart"]
    assert Trace.open(got.result.out).header.notes == tuple(got.result.report.notes)
    assert kinds(imported(runs / "a.jsonl").result.out) == ["tokens_apart"]


REFUSED = {
    "top-k changes": ([META, *TEXT, route(3, [0, 1, 2])], "line 5: it has 3 experts where top-2 was expected"),
    "top-k is not the meta's": ([{**META, "top_k": 3}, *TEXT], "line 2: it has 2 experts where top-3"),
    "a layer that was not logged": ([META, *forward([0, 1], layer=5)], r"layer 5, the meta line says \[3\]"),
    "a layer that is missing": ([{**META, "layers_logged": [3, 9]}, *TEXT], "layer 9 was logged, no row is of it"),
    "layers that are no numbers": ([{**META, "layers_logged": 3}, *TEXT], "line 1: its layers_logged must be a list"),
    "a layer beyond all models": ([route(0, [0, 1], layer=2**40)], "has a layer 1099511627776, legal is 0..16383"),
    "two meta lines": ([META, *TEXT, {**META, "seed": 9}], "line 5: a second meta line contradicts"),
    "ids twice": ([META, *forward([1, 1])], r"line 2: its experts \[1, 1\] are not distinct"),
    "a negative id": ([META, *forward([1, -4])], "expert -4 is out of range"),
    "a huge id": ([META, *forward([1, 2**70])], "is out of range"),
    "ids that are truth values": ([META, route(0, [True, False])], "must be a list of integers"),
    "no ids": ([META, {"type": "route", "token_idx": 0, "layer": 3}], "must be a list of integers"),
    "weights for another number": ([META, route(0, [1, 2], topk_weights=[0.5])], "its weights must be 2 numbers"),
    "a weight that is none": ([META, route(0, [1, 2], topk_weights=[float("nan"), 0.5])], "not all finite"),
    "weights now and then": ([META, route(0, [1, 2], topk_weights=[0.5, 0.5]), route(1, [1, 2])], "no weights, others"),
    "no token_idx": ([META, {"type": "route", "layer": 3, "topk_ids": [0, 1]}], "must be a route line"),
    "a line of another kind": ([META, *TEXT, {"type": "noise"}], "line 5: it must be a route line"),
    "no rows": ([META], "holds no route line"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_contradictions_are_refused_with_their_line(name: str, imported: Import, write: Write) -> None:
    content, message = REFUSED[name]
    with pytest.raises(TraceError, match=message):
        imported(write("a.jsonl", content))


def test_physical_ids_are_refused_where_the_number_of_experts_is_known(imported: Import, write: Write) -> None:
    with pytest.raises(TraceError, match=r"line 4: expert 5 is out of range 0..4: are these physical ids"):
        imported(write("a.jsonl", [META, *TEXT]), experts=5)
    assert imported(write("b.jsonl", [META, *TEXT]), experts=64).result.described.startswith("1 causal layer x 64")


def test_byte_order_mark_and_crlf_are_read(imported: Import, write: Write) -> None:
    text = "\ufeff" + "".join(json.dumps(value) + "\r\n" for value in [META, *TEXT])
    assert imported(write("a.jsonl", text)).rows["a:0"].num_tokens == 3


def test_a_last_line_that_was_cut_is_dropped(imported: Import, write: Write) -> None:
    text = "".join(json.dumps(value) + "\n" for value in [META, *TEXT, route(3, [4, 5])])
    got = imported(write("a.jsonl", text[:-20]))
    assert (got.result.report.rows_read, got.dropped) == (4, {"cut_line": 1})
    assert imported(write("b.jsonl", text[:-1])).result.tokens == 4  # whole, only the line end is missing
    with pytest.raises(TraceError, match="line 3: it is no JSON object"):
        imported(write("c.jsonl", text.replace('"token_idx": 1,', '"token_idx": 1', 1)))


def test_truncated_and_damaged_gzip_is_refused(imported: Import, write: Write) -> None:
    path = write("a.jsonl", [META, *[row for n in range(400) for row in forward([n % 7, 7 + n % 5])]])
    packed = bytearray(gzip.compress(path.read_bytes()))
    with pytest.raises(TraceError, match=r"cut.jsonl.gz is truncated: its gzip data ends after line \d+"):
        imported(_bytes(path.with_name("cut.jsonl.gz"), packed[: len(packed) // 2]))
    packed[-6] ^= 255  # of the checksum
    with pytest.raises(TraceError, match="its gzip data is damaged"):
        imported(_bytes(path.with_name("bad.jsonl.gz"), packed))


def _bytes(path: Path, data: bytes | bytearray) -> Path:
    path.write_bytes(data)
    return path
