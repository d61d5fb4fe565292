"""Sources made to break a reader: each is refused by an error of this package, with what is wrong, and nothing runs."""

from __future__ import annotations

import base64
import json
import os
import types
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from foregate.collect.errors import ForegateError, TraceError
from foregate.collect.importers.config import ImportConfig
from foregate.collect.importing import import_source
from foregate.collect.trace import Trace

from .conftest import Import

ROUTE = '{{"type": "route", "token_idx": 0, "layer": 0, "topk_ids": {ids}, "topk_weights": {weights}}}\n'
PROBLEM = '{{"dataset": "a", "problem_id": {problem}, "layer": 0, "experts": [0, 1], "token_idx": {token}}}\n'
HUGE = "9" * 400  # a legal JSON number, beyond every float

HEADERS = {
    "brackets that stay open": b"(" * 90,
    "a dimension beyond C": b"{'descr':'<i8','fortran_order':False,'shape':(10000000000000000000000,2,3)}",
    "a billion tokens": b"{'descr':'<i8','fortran_order':False,'shape':(1000000000,2,1000)}",
    "a negative dimension": b"{'descr':'<i8','fortran_order':False,'shape':(-1,2,3)}",
    "a dimension that is to be computed": b"{'descr':'<i8','fortran_order':False,'shape':(10**9,2,3)}",
    "a shape that is none": b"{'descr':'<i8','fortran_order':False,'shape':'abc'}",
}


def npy(header: bytes) -> bytes:
    """Give a .npy file of a header and 48 bytes."""
    return b"\x93NUMPY\x01\x00v\x00" + header.ljust(117) + b"\n" + bytes(48)


@pytest.mark.parametrize("name", HEADERS)
def test_headers_that_lie_are_refused_in_every_way_they_come_in(name: str, imported: Import, tmp_path: Path) -> None:
    data = npy(HEADERS[name])
    (tmp_path / "a.npy").write_bytes(data)
    with pytest.raises(TraceError, match="of no known format"):
        imported(tmp_path / "a.npy")
    with pytest.raises(TraceError, match="is no readable NumPy file"):
        imported(tmp_path / "a.npy", format="vllm-routed-experts")
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("experts.npy", data)
        archive.writestr("offsets.npy", data)
    with pytest.raises(TraceError, match="is no readable NumPy file"):
        imported(tmp_path / "a.npz")
    text = json.dumps({"routed_experts": base64.b64encode(data).decode()})
    (tmp_path / "a.jsonl").write_text(text + "\n", encoding="utf-8")
    with pytest.raises(TraceError, match="line 1: routed_experts cannot be decoded"):
        imported(tmp_path / "a.jsonl")


def written(folder: Path, *lines: str) -> Path:
    """Write a log."""
    path = folder / "a.jsonl"
    path.write_text("".join(lines), encoding="utf-8", errors="surrogatepass")
    return path


@pytest.mark.parametrize("weights", [f"[{HUGE}, 1]", f"[0.5, {HUGE}]", f"[-{HUGE}, 1]", "[0.5, NaN]", "[NaN, 0.5]"])
def test_weights_beyond_float16_are_refused(weights: str, imported: Import, tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"line 1: its weights \[.* are not all finite in float16"):
        imported(written(tmp_path, ROUTE.format(ids="[1, 2]", weights=weights)))


def test_a_key_that_stands_twice_is_refused(imported: Import, tmp_path: Path) -> None:
    good = ROUTE.format(ids="[1, 2]", weights="[0.5, 0.5]")
    twice = good.replace("}", ', "topk_ids": [3, 4]}')
    with pytest.raises(TraceError, match="line 2: it is no JSON object, or one with a key twice"):
        imported(written(tmp_path, good, twice))


def test_names_that_no_file_can_hold_are_refused(imported: Import, tmp_path: Path) -> None:
    line = json.dumps({"request_id": "\ud800", "routed_experts": [[[0, 1]], [[1, 0]]]})
    with pytest.raises(TraceError, match=r"its sequence '.*' is no valid Unicode"):
        imported(written(tmp_path, line + "\n"))


def test_requests_of_one_name_are_told_apart_from_those_that_look_so(imported: Import, tmp_path: Path) -> None:
    ids = ["a", "a", "a#2", "a"]
    lines = [json.dumps({"id": name, "routed_experts": [[[0, 1 + n]]]}) + "\n" for n, name in enumerate(ids)]
    found = imported(written(tmp_path, *lines))
    assert {name: found.layer(name, 0)[0][1] for name in found.rows} == {"a": 1, "a#2": 2, "a#2#2": 3, "a#3": 4}


def test_true_is_no_number_of_a_problem(imported: Import, tmp_path: Path) -> None:
    lines = [PROBLEM.format(problem=problem, token=token) for token, problem in enumerate(("true", "1"))]
    with pytest.raises(TraceError, match="its problem_id must be a number or a string, got True"):
        imported(written(tmp_path, lines[0].replace("}", ', "gating_probs": null}'), lines[1]), format=SPECULATIVE)


SPECULATIVE = "speculative-moe-jsonl"

COUNTS: dict[str, tuple[dict[str, Any], str]] = {
    "counts beyond int64": (
        {"moe_l1": np.array([[2**64 - 1, 1]], np.uint64)},
        "expert 0 has the count 1844674407370955",
    ),
    "counts whose sum wraps around": ({"moe_l1": np.full((4, 4), 2**62)}, "legal is 0..1099511627776"),
    "one block twice": ({"moe_l1": [[1, 2]], "moe_l01": [[1, 2]]}, "two arrays of encoder block 1"),
    "a block that no model has": ({"moe_l999999": [[1, 2]]}, "block must lie in 0..16383, got 999999"),
    "batches beyond int64": (
        {"moe_l1": [[1, 2]], "iteration": np.array([2**64 - 1], np.uint64)},
        "iteration runs to 18446744073709551615",
    ),
}


@pytest.mark.parametrize("name", COUNTS)
def test_counts_that_cannot_be_are_refused(name: str, imported: Import, tmp_path: Path) -> None:
    arrays, message = COUNTS[name]
    np.savez(tmp_path / "a.npz", **{key: np.asarray(value) for key, value in arrays.items()})
    with pytest.raises(ForegateError, match=message):
        imported(tmp_path / "a.npz")


def logits(folder: Path, values: np.ndarray) -> Path:
    """Write router logits of one sequence."""
    np.savez(folder / "a.npz", logits=values, offsets=np.array([0, len(values)]))
    return folder / "a.npz"


def test_logits_that_float32_cannot_hold_are_refused(imported: Import, tmp_path: Path) -> None:
    values = np.arange(20.0).reshape(2, 1, 10)
    values[1, 0, 3:5] = 1e300, 2e300  # both infinite as float32: the larger could not be told
    with pytest.raises(TraceError, match="token 1: its logits in layer 0 are not all finite in float32"):
        imported(logits(tmp_path, values))


def test_ties_are_counted_as_the_scores_are_recorded(imported: Import, tmp_path: Path) -> None:
    values = np.array([[[3.0, 1.0, 1.0 + 1e-12, 0.0]]])  # equal as float32, where the smaller id is taken
    found = imported(logits(tmp_path, values), top_k=2)
    assert found.layer("0", 0) == [[0, 1]]
    assert any(
        "In 1 choices the last chosen logit equals the first left out" in note.sentence
        for note in found.result.report.notes
    )


def test_more_logits_than_ids_are_refused(imported: Import, tmp_path: Path) -> None:
    values = np.random.default_rng(0).normal(size=(2, 1, 40_000))
    with pytest.raises(TraceError, match="has 40000 logits a layer, legal are 32768"):
        imported(logits(tmp_path, values))


def test_a_pipe_is_not_waited_for(imported: Import, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.npz")
    with pytest.raises(TraceError, match="is neither a file nor a folder"):
        imported(tmp_path / "a.npz")
    with pytest.raises(TraceError, match="is no file"):
        Trace.open(tmp_path / "a.npz")


def dump(folder: Path, **fields: Any) -> Path:
    """Write a dump of one pass of five tokens, 3 layers, top-2; fields replace those of the pass, or map its ids."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.rand((3, 5, 8), generator=generator).argsort(-1)[:, :, :2]
    record = {"forward_mode": 1, "input_ids": [1, 2, 3, 4, 5], "positions": [0, 1, 2, 3, 4], "topk_ids_of_layer": ids}
    value = {"records": [{**record, **fields}], "last_physical_to_logical_map": fields.pop("map", None)}
    torch.save(value, folder / "a.pt")
    return folder / "a.pt"


IDS = torch.arange(30).reshape(3, 5, 2) % 8
TENSORS = {
    "sparse": IDS.to_sparse(),
    "without data": IDS.to("meta"),
    "of truth values": IDS.to(torch.bool),
    "of floats": IDS.float(),
    "of two dimensions": IDS[0],
}


@pytest.mark.parametrize("name", TENSORS)
def test_tensors_that_are_no_integers_are_refused(name: str, imported: Import, tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="topk_ids_of_layer must be a tensor of integers with 3 dimensions"):
        imported(dump(tmp_path, topk_ids_of_layer=TENSORS[name]))


def test_a_tensor_that_is_one_number_expanded_to_billions_is_refused(imported: Import, tmp_path: Path) -> None:
    ids = torch.zeros(1, dtype=torch.int64).expand(3, 10**9, 2)
    with pytest.raises(TraceError, match="topk_ids_of_layer claims 48000000000 bytes and has 8"):
        imported(dump(tmp_path, topk_ids_of_layer=ids))


def test_a_map_to_experts_that_no_model_has_is_refused(imported: Import, tmp_path: Path) -> None:
    table = torch.arange(8).repeat(3, 1) + 10**9
    with pytest.raises(TraceError, match="it leads to expert 1000000007, legal is 0"):
        imported(dump(tmp_path, map=table))


@pytest.mark.parametrize("count", [-1, 2**62])
def test_counts_of_a_dump_that_cannot_be_are_refused(count: int, imported: Import, tmp_path: Path) -> None:
    torch.save({"logical_count": torch.full((2, 3, 8), count)}, tmp_path / "a.pt")
    with pytest.raises(TraceError, match=f"step 0: its counts run from {count} to {count}, legal is 0..1099511627776"):
        imported(tmp_path / "a.pt")


def test_an_array_that_stands_twice_or_fits_no_memory_is_refused(
    imported: Import, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = logits(tmp_path, np.random.default_rng(0).normal(size=(2, 1, 10)))
    monkeypatch.setattr("psutil.virtual_memory", lambda: types.SimpleNamespace(available=100))
    with pytest.raises(TraceError, match=r"its arrays need 0.0 GiB of memory, 0.0 GiB are free"):
        imported(path)
    monkeypatch.undo()
    with zipfile.ZipFile(path, "a") as archive, pytest.warns(UserWarning, match="Duplicate name"):
        archive.writestr("offsets.npy", archive.read("offsets.npy"))
    with pytest.raises(TraceError, match=r"offsets.npy stands twice"):
        imported(path)


def test_a_trace_may_be_written_under_any_name(tmp_path: Path) -> None:
    source = logits(tmp_path, np.random.default_rng(0).normal(size=(2, 1, 10)))
    import_source(ImportConfig(source=str(source), out=str(tmp_path / "b.npz")))  # a folder, not one file
    assert sum(row.num_tokens for row in Trace.open(tmp_path / "b.npz")) == 2
