"""NumPy sources: the npz layout, router logits, counts; wrong offsets, zeros, pickled objects, odd archives."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from foregate.collect.errors import SettingError, TraceError
from foregate.collect.load_table import LoadTable
from foregate.collect.trace import Trace

Import = Callable[..., Any]

EXPERTS = np.array([[[0, 1]], [[2, 3]], [[1, 0]], [[3, 2]]], np.uint8)  # 4 tokens, 1 layer, top-2
OFFSETS = np.array([0, 1, 4])
LOGITS = np.array([[[3, 1, 2, 0]], [[0, 1, 1, 2]], [[5, 6, 0, 0.5]]], np.float32)  # 3 tokens, 1 layer, 4 experts


def npz(path: Path, **arrays: Any) -> Path:
    """Write an archive."""
    np.savez(path, **arrays)
    return path


class Trap:
    """Make a file when unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


def test_the_npz_layout_with_all_its_columns(imported: Import, tmp_path: Path) -> None:
    (tmp_path / "a.categories.json").write_text('["maths", "law"]', encoding="utf-8")
    weights = np.full(EXPERTS.shape, 0.5, np.float16)
    columns = {
        "prompt_len": [1, 2],
        "conversation": [7, 7],
        "category": [1, 0],
        "token_ids": np.arange(4),
        "weights": weights,
    }
    got = imported(npz(tmp_path / "a.npz", experts=EXPERTS, offsets=OFFSETS, **columns))
    row = got.rows["1"]
    assert row.experts.tolist() == [[2, 3], [1, 0], [3, 2]]
    assert (row.prompt_tokens, row.group, row.category, row.token_ids.tolist()) == (2, "7", "maths", [1, 2, 3])
    header = Trace.open(got.result.out).header
    assert (header.weights, header.vocab_size, header.model) == ("normalized", 4, "a")


def test_empty_sequences_and_unfilled_ends_are_left_out(imported: Import, tmp_path: Path) -> None:
    experts = np.concatenate([EXPERTS, np.zeros((2, 1, 2), np.uint8)])
    got = imported(npz(tmp_path / "a.npz", experts=experts, offsets=np.array([0, 1, 1, 6])))
    assert (list(got.rows), got.dropped) == (["0", "2"], {"not_forwarded": 2})
    assert any("sequence 1 is empty" in note.sentence for note in got.result.report.notes)


def test_warm_up_inside_arrays_is_cut_out(imported: Import, tmp_path: Path) -> None:
    dummies = np.tile(np.array([[[3, 1]]], np.uint8), (300, 1, 1))
    experts = np.concatenate([EXPERTS, dummies, EXPERTS])
    source = npz(tmp_path / "a.npz", experts=experts, offsets=np.array([0, len(experts)]), prompt_len=[305])
    got = imported(source)
    assert got.dropped == {"warm_up": 300}
    assert {name: (row.num_tokens, row.prompt_tokens) for name, row in got.rows.items()} == {"0": (4, 4), "0~2": (4, 1)}
    many = np.tile(EXPERTS[:2], (20, 1, 1))  # twenty equal sequences are a dummy batch too
    again = imported(
        npz(tmp_path / "b.npz", experts=np.concatenate([many, EXPERTS[1:]]), offsets=[*range(0, 41, 2), 43])
    )
    assert (again.dropped, list(again.rows)) == ({"warm_up": 40}, ["20"])


WRONG = {
    "offsets that fall": ({"offsets": [0, 3, 2, 4]}, "offsets must rise .* falling at entry 2"),
    "offsets that end early": ({"offsets": [0, 3]}, r"offsets must rise from 0 to the number of tokens, 4"),
    "offsets that start late": ({"offsets": [1, 4]}, "offsets must rise"),
    "offsets of floats": ({"offsets": [0.0, 4.0]}, "offsets must rise"),
    "offsets below 0": ({"offsets": [0, -1, 4]}, "offsets must rise"),
    "all zeros": ({"experts": np.zeros((4, 2, 2), np.uint8)}, "all its experts are 0"),
    "floats": ({"experts": EXPERTS.astype(float)}, "experts must be integers"),
    "two dimensions": ({"experts": EXPERTS[:, 0]}, "experts must be integers"),
    "ids below -1": ({"experts": EXPERTS.astype(int) - 2}, "token 0, layer 0: expert -2 is out of range"),
    "ids beyond int16": ({"experts": EXPERTS.astype(int) + 2**15}, "is out of range"),
    "ids not distinct": ({"experts": np.ones((4, 1, 2), int)}, "not distinct"),
    "tokens of another length": ({"token_ids": np.arange(3)}, "token_ids must be 4 integers"),
    "weights of another shape": ({"weights": np.ones((4, 1))}, "weights must be floats"),
    "weights that are none": ({"weights": np.full(EXPERTS.shape, np.nan)}, "token 0: its weights are not all finite"),
    "prompts that are no numbers": ({"prompt_len": np.array([np.nan, 1])}, "prompt_len must be integers"),
    "token ids beyond int32": ({"token_ids": np.full(4, 2**40)}, "legal is 0..2147483647"),
    "categories in two dimensions": ({"category": np.ones((2, 2), int)}, "category must be integers or strings"),
    "categories that are no text": ({"category": np.array(["\ud800", "b"])}, "category '.*' is no valid Unicode"),
    "prompts of another length": ({"prompt_len": [1]}, "prompt_len must be integers"),
    "Python objects": ({"experts": np.array([None, 1], object)}, "it holds an array of Python objects"),
}


@pytest.mark.parametrize("name", WRONG)
def test_arrays_that_do_not_fit_are_refused(name: str, imported: Import, tmp_path: Path) -> None:
    arrays, message = WRONG[name]
    with pytest.raises(TraceError, match=message):
        imported(npz(tmp_path / "a.npz", **{"experts": EXPERTS, "offsets": OFFSETS, **arrays}))


def test_physical_ids_and_other_top_k_are_refused(imported: Import, tmp_path: Path) -> None:
    source = npz(tmp_path / "a.npz", experts=EXPERTS, offsets=OFFSETS)
    with pytest.raises(TraceError, match=r"token 1, layer 0: expert 3 is out of range 0..2: are these physical ids"):
        imported(source, experts=3)
    with pytest.raises(TraceError, match="top-2 where top-4 was expected"):
        imported(source, top_k=4)
    folder = tmp_path / "two"
    folder.mkdir()
    npz(folder / "a.npz", experts=EXPERTS, offsets=OFFSETS)
    npz(folder / "b.npz", experts=np.repeat(EXPERTS, 2, axis=1), offsets=OFFSETS)
    with pytest.raises(TraceError, match="different layers"):
        imported(folder)


@pytest.mark.parametrize("name", ["npz", "olmoe-logits", "switch-counts", "vllm-routed-experts"])
def test_nothing_is_unpickled(name: str, imported: Import, tmp_path: Path) -> None:
    sprung = tmp_path / "sprung"
    traps = np.array([Trap(sprung), Trap(sprung)], object)
    arrays = ("experts", "offsets", "logits", "moe_l1", "routed_experts")
    with pytest.raises(TraceError, match="it holds an array of Python objects"):
        imported(npz(tmp_path / "a.npz", **dict.fromkeys(arrays, traps)), format=name)
    assert not sprung.exists()
    np.save(tmp_path / "b.npy", traps)
    with pytest.raises(TraceError):
        imported(tmp_path / "b.npy", format=name)
    assert not sprung.exists()


def test_names_that_climb_out_of_an_archive_write_nothing(imported: Import, tmp_path: Path) -> None:
    source = npz(tmp_path / "a.npz", experts=EXPERTS, offsets=OFFSETS)
    with zipfile.ZipFile(source, "a") as archive:
        archive.writestr("../../escaped.npy", archive.read("offsets.npy"))
    assert imported(source).result.tokens == 4
    assert not list(tmp_path.parent.rglob("escaped*"))
    assert not (tmp_path.parent.parent / "escaped.npy").exists()


def test_a_truncated_archive_is_refused(imported: Import, tmp_path: Path) -> None:
    source = npz(tmp_path / "a.npz", experts=EXPERTS, offsets=OFFSETS)
    source.write_bytes(source.read_bytes()[:-40])
    with pytest.raises(TraceError, match=r"a\.npz is no readable NumPy file"):
        imported(source, format="npz")


def test_logits_become_ids_and_scores(imported: Import, tmp_path: Path) -> None:
    got = imported(npz(tmp_path / "a.npz", logits=LOGITS, offsets=[0, 2, 3]), top_k=2)
    assert [row.experts.tolist() for row in got.rows.values()] == [[[0, 2], [3, 1]], [[1, 0]]]  # 1 before 2: the tie
    assert got.rows["1"].scores.tolist() == [[5, 6, 0, 0.5]]
    assert any("In 1 choices" in note.sentence for note in got.result.report.notes)
    assert Trace.open(got.result.out).header.scores == "selection"


def test_logits_that_say_nothing_are_refused(imported: Import, tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="top_k must be at most 4, the number of logits, got 8"):
        imported(npz(tmp_path / "a.npz", logits=LOGITS, offsets=[0, 3]))
    for name, logits, message in (
        ("zero", np.concatenate([LOGITS, np.zeros((1, 1, 4))]), "token 3: its logits in layer 0 are all 0 .*never ran"),
        ("nan", np.where(LOGITS == 6, np.nan, LOGITS), "token 2: its logits in layer 0 are not all finite"),
        ("ids", LOGITS.astype(int), "logits must be floats"),
    ):
        with pytest.raises(TraceError, match=message):
            imported(npz(tmp_path / f"{name}.npz", logits=logits, offsets=[0, len(logits)]), top_k=2)


def test_counts_keep_stacks_blocks_and_batches(imported: Import, tmp_path: Path) -> None:
    counts = np.array([[3, 1], [2, 1]])
    source = npz(tmp_path / "a.npz", moe_l11=counts, moe_l2=counts * 2, moe_l1_decode=counts, iteration=[8, 9])
    got = imported(source, model="switch", top_k=1)
    table = LoadTable.open(got.result.out)
    assert [(layer.stack, layer.block, layer.top_k) for layer in table.header.runs["a"]] == [
        ("encoder", 2, 1),
        ("encoder", 11, 1),
        ("decoder", 1, 1),
    ]
    assert [(row.layer, row.batch, row.counts.tolist()) for row in table][:2] == [(0, 8, [6, 2]), (0, 9, [4, 2])]
    assert (got.result.report.rows_read, got.result.tokens) == (6, 0)
    assert any("in 3 of 6 rows the counts sum to less" in note.sentence for note in got.result.report.notes)


COUNTS = {
    "below 0": ({"moe_l1": [[1, -1]]}, "moe_l1, row 0: expert 1 has the count -1"),
    "all zeros": ({"moe_l1": [[0, 0]]}, "all counts of moe_l1 are 0"),
    "floats": ({"moe_l1": [[0.5, 1.0]]}, "must be integers"),
    "other batches": ({"moe_l1": [[1, 1]], "moe_l3": [[1, 1], [1, 1]]}, "moe_l3 has 2 batches, others 1"),
    "batches twice": ({"moe_l1": [[1, 1], [1, 1]], "iteration": [3, 3]}, "iteration must be 2 different integers"),
}


@pytest.mark.parametrize("name", COUNTS)
def test_counts_that_do_not_fit_are_refused(name: str, imported: Import, tmp_path: Path) -> None:
    arrays, message = COUNTS[name]
    with pytest.raises(TraceError, match=message):
        imported(npz(tmp_path / "a.npz", **{key: np.array(value) for key, value in arrays.items()}))
