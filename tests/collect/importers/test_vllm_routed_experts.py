"""What vLLM's --enable-return-routed-experts gives: forms of its arrays, dense blocks, tokens that were not fed."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from foregate.collect.errors import TraceError
from foregate.collect.trace import Trace

Import = Callable[..., Any]
Write = Callable[..., Path]

IDS = [[[0, 1], [0, 0], [5, 2]], [[3, 1], [0, 0], [4, 2]], [[1, 2], [0, 0], [3, 2]]]  # layer 1 is a dense block


def npy(ids: Any, dtype: str = "int16") -> str:
    """Encode an array as vLLM's server does."""
    file = io.BytesIO()
    np.save(file, np.array(ids, dtype))
    return base64.b64encode(file.getvalue()).decode()


def packed(ids: Any) -> dict[str, Any]:
    """Encode an array as an object."""
    array = np.array(ids, np.int16)
    return {"data": base64.b64encode(array.tobytes()).decode(), "dtype": "int16", "shape": list(array.shape)}


FORMS = {"lists": lambda ids: ids, "npy": npy, "uint8": lambda ids: npy(ids, "uint8"), "object": packed}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_an_array_is_read(form: str, imported: Import, write: Write) -> None:
    encode = FORMS[form]
    response = {
        "id": "x",
        "prompt_token_ids": [8, 9],
        "choices": [{"token_ids": [5, 6], "routed_experts": encode(IDS)}],
    }
    row = imported(write("a.jsonl", [response])).rows["x"]
    assert row.experts.tolist() == [[0, 1, 5, 2], [3, 1, 4, 2], [1, 2, 3, 2]]
    assert (row.token_ids.tolist(), row.prompt_tokens) == ([8, 9, 5], 2)  # the last token was never fed


def test_dense_blocks_are_left_out_and_said(imported: Import, write: Write) -> None:
    got = imported(write("a.jsonl", [{"routed_experts": IDS}]))
    assert [layer.block for layer in Trace.open(got.result.out).topology.layers] == [0, 2]
    assert any("[1] hold expert 0 throughout" in note.sentence for note in got.result.report.notes)


def test_prompt_apart_and_several_completions(imported: Import, write: Write) -> None:
    prompt, rest = IDS[:2], IDS[2:]
    choices = [{"routed_experts": rest, "token_ids": [5, 6]}, {"routed_experts": rest, "token_ids": [7]}]
    response = {"id": "x", "prompt_token_ids": [8, 9], "prompt_routed_experts": prompt, "choices": choices}
    got = imported(write("a.jsonl", [response]))
    assert {name: (row.group, row.token_ids.tolist()) for name, row in got.rows.items()} == {
        "x/0": ("x", [8, 9, 5]),
        "x/1": ("x", [8, 9, 7]),
    }


def test_a_completion_without_its_prompt(imported: Import, write: Write) -> None:
    output = {"token_ids": [5, 6, 7, 8], "routed_experts": IDS}
    row = imported(write("a.jsonl", [{"prompt_token_ids": [1] * 9, "outputs": [output]}])).rows["a:1"]
    assert (row.token_ids.tolist(), row.prompt_tokens) == ([5, 6, 7], 0)


def test_arrays_in_files_of_their_own(imported: Import, tmp_path: Path) -> None:
    folder = tmp_path / "requests"
    folder.mkdir()
    np.save(folder / "a.npy", np.array(IDS, np.int32))
    np.savez(
        folder / "b.npz", routed_experts=np.array(IDS), prompt_token_ids=np.array([1, 2, 3]), token_ids=np.array([4])
    )
    got = imported(folder)
    assert got.result.format == "vllm-routed-experts"
    assert (got.rows["a"].token_ids, got.rows["b"].prompt_tokens) == (None, 3)
    assert got.rows["a"].experts.tolist() == got.rows["b"].experts.tolist()


def test_tokens_that_no_forward_saw_are_dropped(imported: Import, write: Write) -> None:
    nothing = [[0, 0], [0, 0], [0, 0]]
    sentinel = [[-1, -1], [-1, -1], [-1, -1]]
    got = imported(write("a.jsonl", [{"id": "x", "routed_experts": [nothing, *IDS, sentinel, *IDS, nothing]}]))
    assert got.dropped == {"not_forwarded": 3}
    assert {name: row.num_tokens for name, row in got.rows.items()} == {"x": 3, "x~2": 3}  # neighbours stay neighbours


def lying() -> str:
    """Encode an array whose header claims far more than it has."""
    file = io.BytesIO()
    shape = (10**7, 10**7, 2)
    np.lib.format.write_array_header_1_0(file, {"descr": "<i2", "fortran_order": False, "shape": shape})
    return base64.b64encode(file.getvalue() + bytes(40)).decode()


RETURNED = {
    "all zeros": ([{"routed_experts": [[[0, 0]] * 2] * 9}], "All 9 rows .* are expert 0: the capture was never bound"),
    "rows that are not the tokens'": (
        [{"routed_experts": IDS, "prompt_token_ids": [1], "token_ids": [1, 2, 3, 4, 5, 6]}],
        "line 1: it has 3 rows of routing for 7 tokens",
    ),
    "other layers": ([{"routed_experts": IDS}, {"routed_experts": [[[0, 1]]]}], "line 2: it has 1 layers where 3"),
    "other top-k": ([{"routed_experts": IDS}, {"routed_experts": [[[1]] * 3]}], "line 2: it has top-1 where top-2"),
    "ragged lists": ([{"routed_experts": [[[0, 1], [2]]]}], "line 1: routed_experts cannot be decoded"),
    "text": ([{"routed_experts": "no base64!"}], "line 1: routed_experts cannot be decoded"),
    "base64 of something": ([{"routed_experts": base64.b64encode(b"x" * 99).decode()}], "no base64 of a .npy file"),
    "floats": ([{"routed_experts": [[[0.5, 1.5]]]}], "must be integers"),
    "two dimensions": ([{"routed_experts": [[0, 1]]}], "must be integers"),
    "null": ([{"routed_experts": None}], "it has no routed_experts; start vLLM with"),
    "a shape that lies": ([{"routed_experts": {**packed(IDS), "shape": [9, 9, 9]}}], "cannot be decoded"),
    "a size that lies": ([{"routed_experts": lying()}], "cannot be decoded"),
    "a dtype of objects": ([{"routed_experts": {**packed(IDS), "dtype": "object"}}], "cannot be decoded"),
    "ids not distinct": ([{"routed_experts": [[[1, 1]], [[2, 1]]]}], "not distinct"),
}


@pytest.mark.parametrize("name", RETURNED)
def test_returned_routing_that_is_wrong_is_refused(name: str, imported: Import, write: Write) -> None:
    content, message = RETURNED[name]
    with pytest.raises(TraceError, match=message):
        imported(write("a.jsonl", content))


def test_returned_physical_ids_are_refused(imported: Import, write: Write) -> None:
    with pytest.raises(TraceError, match=r"token 0, layer 2: expert 5 is out of range 0..4: are these physical ids"):
        imported(write("a.jsonl", [{"routed_experts": IDS}]), experts=5)
