"""Dumps of SGLang's recorder: linking by position, replicas, dense blocks, counts, ranks, and hostile pickles."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from foregate.collect.errors import TraceError
from foregate.collect.load_table import LoadTable
from foregate.collect.trace import Trace

Import = Callable[..., Any]

EXTEND, DECODE = 1, 2
MAP = torch.tensor([[0, 1, 2, 3, 1, 0]] * 3)  # 4 logical experts, 6 places: 4 is a replica of 1, 5 of 0


def record(tokens: list[int], positions: list[int], ids: list[list[int]], mode: int = DECODE, **values: Any) -> dict:
    """Make a pass of three layers, the first dense; both MoE layers choose alike."""
    table = torch.full((3, len(tokens), 8), -1, dtype=torch.int32)
    for token, chosen in enumerate(ids):
        table[1:, token, : len(chosen)] = torch.tensor(chosen, dtype=torch.int32)
    return {
        "forward_pass_id": 5,
        "rank": 0,
        "gatherer_key": "primary",
        "input_ids": tokens,
        "positions": positions,
        "extend_seq_lens": None,
        "forward_mode": mode,
        "topk_ids_of_layer": table,
        "misc_objects": [],
        **values,
    }


def dump(path: Path, *records: dict, **values: Any) -> Path:
    """Save a dump."""
    torch.save({"records": list(records), "last_physical_to_logical_map": MAP, **values}, path)
    return path


PREFILL = record(
    [11, 12, 13, 21, 22], [0, 1, 2, 0, 1], [[0, 4], [2, 3], [5, 1], [3, 0], [4, 5]], EXTEND, extend_seq_lens=[3, 2]
)


def test_replicas_are_mapped_and_requests_split(imported: Import, tmp_path: Path) -> None:
    got = imported(dump(tmp_path / "d.pt", PREFILL))
    assert got.result.described == "2 causal layers x 4 experts, top-2"
    assert [layer.block for layer in Trace.open(got.result.out).topology.layers] == [1, 2]  # layer 0 is dense
    first, second = got.rows.values()
    assert first.experts.tolist() == [[0, 1, 0, 1], [2, 3, 2, 3], [0, 1, 0, 1]]
    assert second.experts.tolist() == [[3, 0, 3, 0], [1, 0, 1, 0]]
    assert (first.token_ids.tolist(), first.prompt_tokens) == ([11, 12, 13], 3)


def test_decoded_tokens_go_to_the_only_sequence_of_their_length(imported: Import, tmp_path: Path) -> None:
    decode = record([14, 23], [3, 2], [[0, 2], [1, 3]])
    later = record([15, 24], [4, 3], [[2, 0], [3, 1]])
    got = imported(dump(tmp_path / "d.pt", PREFILL, decode, later))
    assert [row.token_ids.tolist() for row in got.rows.values()] == [[11, 12, 13, 14, 15], [21, 22, 23, 24]]
    assert [row.prompt_tokens for row in got.rows.values()] == [3, 2]
    assert not got.dropped


def test_decoded_tokens_that_could_belong_to_two_are_dropped(imported: Import, tmp_path: Path) -> None:
    alike = record([1, 2, 3, 4], [0, 1, 0, 1], [[0, 1], [1, 2], [2, 3], [3, 0]], EXTEND, extend_seq_lens=[2, 2])
    decode = record([5, 6], [2, 2], [[0, 1], [1, 2]])
    lost = record([7], [9], [[0, 1]])  # of a request from before the recording
    got = imported(dump(tmp_path / "d.pt", alike, decode, lost))
    assert (got.dropped, got.result.tokens) == ({"unlinked": 3}, 4)


def test_chunks_cached_prefixes_and_other_passes(imported: Import, tmp_path: Path) -> None:
    chunk = record([1, 2], [0, 1], [[0, 1], [1, 2]], EXTEND, extend_seq_lens=[2])
    rest = record([3], [2], [[2, 3]], EXTEND, extend_seq_lens=[1])
    cached = record([8, 9], [40, 41], [[0, 3], [3, 1]], EXTEND, extend_seq_lens=[2])
    draft = record([5, 5], [3, 4], [[0, 1], [1, 2]], 5)
    idle = record([], [], [], 4)
    got = imported(dump(tmp_path / "d.pt", chunk, rest, cached, draft, idle))
    assert got.dropped == {"other_pass": 2}
    assert [(row.num_tokens, row.prompt_tokens) for row in got.rows.values()] == [(3, 3), (2, 2)]
    assert list(got.rows.values())[1].source.endswith("from position 40")
    assert any("1 sequences start behind a cached prefix" in note.sentence for note in got.result.report.notes)


def test_tokens_without_ids_are_dropped(imported: Import, tmp_path: Path) -> None:
    padded = record([1, 2, 3, 4], [0, 1, 2, 3], [[0, 1], [1, 2], [3], []], EXTEND, extend_seq_lens=[4])
    got = imported(dump(tmp_path / "d.pt", padded))
    assert (got.dropped, got.result.tokens) == ({"not_forwarded": 1, "incomplete_token": 1}, 2)


def test_ranks_that_saw_the_same_tokens_count_once(imported: Import, tmp_path: Path) -> None:
    folder = tmp_path / "ranks"
    folder.mkdir()
    dump(folder / "r_0.pt", PREFILL)
    dump(folder / "r_1.pt", {**PREFILL, "rank": 1})
    got = imported(folder)
    assert (got.dropped, got.result.tokens, got.result.report.rows_read) == ({"duplicate": 5}, 5, 10)


def test_without_a_map_ids_must_be_logical(imported: Import, tmp_path: Path) -> None:
    source = dump(tmp_path / "d.pt", PREFILL, last_physical_to_logical_map=None)
    with pytest.raises(TraceError, match=r"pass 5: expert 5 is out of range 0..3: are these physical ids"):
        imported(source, experts=4)
    got = imported(source)
    assert any("taken for logical ones" in note.sentence for note in got.result.report.notes)


WRONG = {
    "ids beyond the map": (record([1], [0], [[0, 9]], EXTEND), "ids up to 9, the map is for 3 layers of 6"),
    "an id below -1": (record([1], [0], [[0, -3]], EXTEND), None),
    "positions that jump": (record([1, 2], [0, 5], [[0, 1], [1, 2]], EXTEND, extend_seq_lens=[2]), "do not rise by 1"),
    "tokens and positions that differ": (record([1, 2], [0], [[0, 1], [1, 2]], EXTEND), "2 tokens, 1 positions"),
    "requests of other lengths": (record([1], [0], [[0, 1]], EXTEND, extend_seq_lens=[3]), "requests of 3 tokens"),
    "tokens that are text": (record([1], [0], [[0, 1]], EXTEND, input_ids="a"), "input_ids must be a list of integers"),
    "no mode": (record([1], [0], [[0, 1]], EXTEND, forward_mode=None), "its forward_mode must be a number"),
    "ids of floats": (record([1], [0], [[0, 1]], EXTEND, topk_ids_of_layer=torch.ones(3, 1, 8)), "tensor of integers"),
}


@pytest.mark.parametrize("name", WRONG)
def test_passes_that_do_not_fit_are_refused(name: str, imported: Import, tmp_path: Path) -> None:
    wrong, message = WRONG[name]
    source = dump(tmp_path / "d.pt", PREFILL, wrong)
    if message is None:  # masked: what is below 0 is an absent expert
        assert imported(source).dropped == {"incomplete_token": 1}
        return
    with pytest.raises(TraceError, match=message):
        imported(source)


def test_counts_per_pass_become_a_load_table_of_logical_experts(imported: Import, tmp_path: Path) -> None:
    counts = torch.tensor([[0] * 6, [1, 2, 3, 4, 10, 20], [5, 0, 0, 0, 0, 0]], dtype=torch.int32)
    one = {"forward_pass_id": 0, "rank": 0, "gatherer_key": "primary", "global_physical_count": counts}
    got = imported(dump(tmp_path / "d.pt", one, {**one, "forward_pass_id": 1}))
    table = LoadTable.open(got.result.out)
    assert [layer.block for layer in table.header.runs["d"]] == [1, 2]
    assert [(row.layer, row.batch, row.counts.tolist()) for row in table] == [
        (0, 0, [21, 12, 3, 4]),
        (1, 0, [5, 0, 0, 0]),
        (0, 1, [21, 12, 3, 4]),
        (1, 1, [5, 0, 0, 0]),
    ]
    assert got.result.report.rows_read == 4


def test_statistics_become_a_load_table(imported: Import, tmp_path: Path) -> None:
    counts = torch.zeros(3, 2, 4, dtype=torch.int32)
    counts[1] = torch.tensor([[1, 2, 3, 4], [4, 3, 2, 1]])
    torch.save({"rank": 0, "logical_count": counts, "average_utilization_rate_over_window": None}, tmp_path / "s.pt")
    got = imported(tmp_path / "s.pt")
    rows = [(row.layer, row.batch, row.counts.tolist()) for row in LoadTable.open(got.result.out)]
    assert rows == [(0, 1, [1, 2, 3, 4]), (1, 1, [4, 3, 2, 1])]  # steps of the buffer that were not used are left out


def test_dumps_that_hold_nothing_are_refused(imported: Import, tmp_path: Path) -> None:
    nothing = record([1], [0], [[]], EXTEND)
    for name, source, message in (
        ("no ids", dump(tmp_path / "a.pt", nothing), "holds no expert ids"),
        ("no records", dump(tmp_path / "b.pt"), "not empty"),
    ):
        with pytest.raises(TraceError, match=message):
            imported(source)
        assert name
    zeros = record([1, 2], [0, 1], [[0], [0]], EXTEND, extend_seq_lens=[2])
    with pytest.raises(TraceError, match="all its experts are 0"):
        imported(dump(tmp_path / "c.pt", zeros))
    torch.save({"weights": torch.ones(2)}, tmp_path / "d.pt")
    with pytest.raises(TraceError, match="is no dump of an expert distribution"):
        imported(tmp_path / "d.pt")
    torch.save({"logical_count": torch.zeros(2, 2, 2, dtype=torch.int32)}, tmp_path / "e.pt")
    with pytest.raises(TraceError, match="counts no token"):
        imported(tmp_path / "e.pt")


class Trap:
    """Call something when unpickled."""

    def __init__(self, call: Any, *arguments: Any) -> None:
        self.call, self.arguments = call, arguments

    def __reduce__(self) -> Any:
        return self.call, self.arguments


@pytest.mark.parametrize("place", ["beside", "inside a record", "in place of all"])
@pytest.mark.parametrize("kind", ["os.system", "os.mkdir", "eval"])
def test_hostile_pickles_are_refused_and_nothing_is_executed(
    kind: str, place: str, imported: Import, tmp_path: Path
) -> None:
    sprung = tmp_path / "sprung"
    trap = {
        "os.system": Trap(os.system, f"touch {sprung}"),
        "os.mkdir": Trap(os.mkdir, str(sprung)),
        "eval": Trap(eval, f"open({str(sprung)!r}, 'w').close()"),
    }[kind]
    source = tmp_path / "d.pt"
    if place == "in place of all":
        torch.save(trap, source)
    elif place == "beside":
        dump(source, PREFILL, extra=trap)
    else:
        dump(source, {**PREFILL, "misc_objects": [trap]})
    for options in ({}, {"format": "sglang-dump"}):
        with pytest.raises(TraceError, match="nothing was executed") as caught:
            imported(source, **options)
        assert "\n" not in str(caught.value)
    assert not sprung.exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["d.pt"]
    torch.load(source, weights_only=False)  # the trap works: an ordinary reader springs it
    assert sprung.exists()


def test_plain_pickles_and_cut_dumps_are_refused(imported: Import, tmp_path: Path) -> None:
    sprung = tmp_path / "sprung"
    torch.save(Trap(os.mkdir, str(sprung)), tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    whole = dump(tmp_path / "d.pt", PREFILL).read_bytes()
    (tmp_path / "cut.pt").write_bytes(whole[: len(whole) // 2])
    for name in ("old.pt", "cut.pt"):
        with pytest.raises(TraceError) as caught:
            imported(tmp_path / name, format="sglang-dump")
        assert name in str(caught.value)
        assert "\n" not in str(caught.value)
    assert not sprung.exists()
