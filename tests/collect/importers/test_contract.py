"""What holds for every importer: written by hand in its format, a trace comes back row by row."""

from __future__ import annotations

import base64
import csv
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from foregate.collect.errors import SettingError, TraceError
from foregate.collect.importers import IMPORTERS
from foregate.collect.importers.config import ImportConfig
from foregate.collect.importing import import_source
from foregate.collect.load_table import LoadTable
from foregate.collect.sequence import SequenceRouting
from foregate.collect.trace import Trace
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

# T tokens, L MoE layers, K top-k, E experts

Sequence = tuple[np.ndarray, np.ndarray]  # token ids [T], experts [T, L, K]


class Drawn(NamedTuple):
    """Hold a random trace and its number of experts."""

    sequences: list[Sequence]
    num_experts: int


def draw(seed: int, lengths: list[int], num_layers: int, num_experts: int, top_k: int) -> Drawn:
    """Draw distinct ids; the largest expert is chosen somewhere, so that 1 + the largest id is the number."""
    generator = np.random.default_rng(seed)
    sequences = []
    for length in lengths:
        order = np.argsort(generator.random((length, num_layers, num_experts)), axis=2)
        sequences.append((generator.integers(1, 90, length), order[:, :, :top_k]))
    ids = sequences[0][1]
    ids[0, 0] = [num_experts - 1, *range(top_k - 1)]
    ids[-1, :] = ids[0, 0]  # the last token of a log that is told from an unfilled buffer
    return Drawn(sequences, num_experts)


def write_npz(folder: Path, drawn: Drawn) -> Path:
    """Write the npz layout."""
    experts = np.concatenate([ids for _, ids in drawn.sequences]).astype(np.uint8)
    offsets = np.cumsum([0, *(len(ids) for _, ids in drawn.sequences)])
    tokens = np.concatenate([tokens for tokens, _ in drawn.sequences]).astype(np.int32)
    np.savez(folder / "a.npz", experts=experts, offsets=offsets, token_ids=tokens)
    return folder / "a.npz"


def write_logits(folder: Path, drawn: Drawn) -> Path:
    """Write logits whose k largest are the ids in order."""
    experts = np.concatenate([ids for _, ids in drawn.sequences])
    logits = np.tile(-1.0 - np.arange(drawn.num_experts), (*experts.shape[:2], 1))
    falling = np.broadcast_to(np.arange(experts.shape[2], 0, -1.0), experts.shape)
    np.put_along_axis(logits, experts, falling, axis=2)
    offsets = np.cumsum([0, *(len(ids) for _, ids in drawn.sequences)])
    np.savez(folder / "a.npz", logits=logits.astype(np.float32), offsets=offsets)
    return folder / "a.npz"


def lines(path: Path, values: list[dict[str, object]]) -> Path:
    """Write JSON lines."""
    path.write_text("".join(json.dumps(value) + "\n" for value in values), encoding="utf-8")
    return path


def write_vllm(folder: Path, drawn: Drawn) -> Path:
    """Write each sequence as one forward, layer by layer."""
    layers, top_k = drawn.sequences[0][1].shape[1:]
    made: list[dict[str, object]] = [
        {"type": "meta", "model_id": "m", "layers_logged": list(range(layers)), "top_k": top_k}
    ]
    for _, ids in drawn.sequences:
        for layer in range(layers):
            for token, chosen in enumerate(ids[:, layer].tolist()):
                made.append({"type": "route", "req_id": "r1", "token_idx": token, "layer": layer, "topk_ids": chosen})
    return lines(folder / "a.jsonl", made)


def write_by_layer(folder: Path, drawn: Drawn) -> Path:
    """Write one file per layer; the contract compares them apart."""
    for layer in range(drawn.sequences[0][1].shape[1]):
        lines(
            folder / f"layer{layer}.jsonl",
            [
                {"type": "route", "token_idx": token, "layer": layer, "topk_ids": chosen}
                for _, ids in drawn.sequences
                for token, chosen in enumerate(ids[:, layer].tolist())
            ],
        )
    return folder


def write_speculative(folder: Path, drawn: Drawn) -> Path:
    """Write each sequence as one problem."""
    made: list[dict[str, object]] = [
        {"dataset": "d", "problem_id": n, "layer": layer, "experts": chosen, "token_idx": token}
        for n, (_, ids) in enumerate(drawn.sequences)
        for layer in range(ids.shape[1])
        for token, chosen in enumerate(ids[:, layer].tolist())
    ]
    return lines(folder / "a.jsonl", made)


def write_csv(folder: Path, drawn: Drawn) -> Path:
    """Write each sequence as one batch number; tokens hold quotes, commas and line ends."""
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    writer.writerow(["Layer ID", "Batch Number", "Token", "Activated Expert IDs"])
    for n, (tokens, ids) in enumerate(drawn.sequences):
        for layer in range(ids.shape[1]):
            for token, chosen in zip(tokens.tolist(), ids[:, layer].tolist(), strict=True):
                writer.writerow([layer + 1, n, f'{token},"\n', str(chosen)])
    (folder / "a.csv").write_text(text.getvalue(), encoding="utf-8", newline="")
    return folder / "a.csv"


def write_text(folder: Path, drawn: Drawn) -> Path:
    """Print a prefill of two tokens and forwards of one, as torch prints them."""
    made = []
    for tokens, ids in drawn.sequences:
        for part in [slice(0, 2), *(slice(i, i + 1) for i in range(2, len(ids)))]:
            for layer in range(ids.shape[1]):
                made.append(f"input_ids: {torch.tensor(tokens[None, part])} \n")
                made.append(f"Layer {layer} topk_ids: {torch.tensor(ids[part, layer], dtype=torch.int32)}\n")
    (folder / "a.txt").write_text("".join(made), encoding="utf-8")
    return folder / "a.txt"


def write_routed(folder: Path, drawn: Drawn) -> Path:
    """Write responses: a prompt of two tokens, base64 of a .npy file, and a last token without a row."""
    made: list[dict[str, object]] = []
    for n, (tokens, ids) in enumerate(drawn.sequences):
        file = io.BytesIO()
        np.save(file, ids.astype(np.uint8))
        choice = {"routed_experts": base64.b64encode(file.getvalue()).decode(), "token_ids": [*tokens[2:].tolist(), 7]}
        made.append({"id": f"r{n}", "prompt_token_ids": tokens[:2].tolist(), "choices": [choice]})
    return lines(folder / "a.jsonl", made)


def write_sglang(folder: Path, drawn: Drawn) -> Path:
    """Write each sequence as one prefill pass."""
    top_k, physical = drawn.sequences[0][1].shape[2], drawn.num_experts
    records = []
    for n, (tokens, ids) in enumerate(drawn.sequences):
        table = np.full((ids.shape[1], len(ids), 8), -1, np.int32)
        table[:, :, :top_k] = ids.transpose(1, 0, 2)
        records.append(
            {
                "forward_pass_id": n,
                "rank": 0,
                "gatherer_key": "primary",
                "input_ids": tokens.tolist(),
                "positions": list(range(len(ids))),
                "extend_seq_lens": [len(ids)],
                "forward_mode": 1,
                "topk_ids_of_layer": torch.from_numpy(table),
                "misc_objects": [],
            }
        )
    same = torch.arange(physical).repeat(drawn.sequences[0][1].shape[1], 1)
    torch.save({"records": records, "last_physical_to_logical_map": same}, folder / "a.pt")
    return folder / "a.pt"


def write_counts(folder: Path, drawn: Drawn) -> Path:
    """Write the counts per layer, each sequence being a batch."""
    layers = drawn.sequences[0][1].shape[1]
    counts = {
        f"moe_l{layer}": np.array(
            [np.bincount(ids[:, layer].ravel(), minlength=drawn.num_experts) for _, ids in drawn.sequences]
        )
        for layer in range(layers)
    }
    np.savez(folder / "a.npz", **counts)
    return folder / "a.npz"


WRITERS: dict[str, Callable[[Path, Drawn], Path]] = {
    "mixtral-text": write_text,
    "moe-beyond-csv": write_csv,
    "npz": write_npz,
    "olmoe-logits": write_logits,
    "sglang-dump": write_sglang,
    "speculative-moe-jsonl": write_speculative,
    "switch-counts": write_counts,
    "vllm-jsonl": write_vllm,
    "vllm-jsonl-by-layer": write_by_layer,
    "vllm-routed-experts": write_routed,
}
WITH_TOKENS = {"mixtral-text", "npz", "sglang-dump", "vllm-routed-experts"}
NAMES = sorted(IMPORTERS)
SMALL = draw(0, [5, 3, 4], 2, 6, 2)


def test_every_importer_has_a_writer_here() -> None:
    assert set(WRITERS) == set(IMPORTERS)
    assert all(importer.name == name and importer.example for name, importer in IMPORTERS.items())


def options_of(name: str, drawn: Drawn) -> dict[str, int]:
    """Give what the format cannot know."""
    return {"top_k": drawn.sequences[0][1].shape[2]} if name == "olmoe-logits" else {}


def came_back(name: str, source: Path, out: Path, drawn: Drawn) -> None:
    """Import and compare with what was drawn."""
    config = ImportConfig(source=str(source), out=str(out), **options_of(name, drawn))
    result = import_source(config)
    assert result.format == name
    assert not result.report.rows_dropped
    layers, top_k = drawn.sequences[0][1].shape[1:]
    if name == "switch-counts":
        got = {(row.layer, row.batch): row.counts.tolist() for row in LoadTable.open(out)}
        assert got == {
            (layer, n): np.bincount(ids[:, layer].ravel(), minlength=drawn.num_experts).tolist()
            for n, (_, ids) in enumerate(drawn.sequences)
            for layer in range(layers)
        }
        return
    trace = Trace.open(out)
    assert [layer.num_experts for layer in trace.topology.layers] == [drawn.num_experts] * layers
    found = list(trace.sequences())
    if name == "vllm-jsonl-by-layer":
        found = _joined(found, layers, top_k)
    for row, (tokens, ids) in zip(found, drawn.sequences, strict=True):
        assert row.experts.tolist() == ids.reshape(len(ids), -1).tolist()
        assert (row.token_ids is not None) == (name in WITH_TOKENS)
        assert row.token_ids is None or row.token_ids.tolist() == tokens.tolist()


def _joined(rows: list[SequenceRouting], layers: int, top_k: int) -> list[SequenceRouting]:
    """Put the runs of single layers side by side, as the writer had them."""
    by_run = [rows[i :: len(rows) // layers] for i in range(len(rows) // layers)]
    for run in by_run:
        for layer, row in enumerate(run):
            outside = np.delete(row.experts, np.s_[layer * top_k : (layer + 1) * top_k], axis=1)
            assert (outside == -1).all()
    return [SequenceRouting(sequence="", experts=np.max([row.experts for row in run], axis=0)) for run in by_run]


@pytest.mark.parametrize("name", NAMES)
def test_its_files_are_claimed_by_it_alone_and_come_back(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "source"
    folder.mkdir()
    came_back(name, WRITERS[name](folder, SMALL), tmp_path / "out", SMALL)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("switch-counts", "vllm-jsonl-by-layer")])
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 2**32 - 1),
    lengths=st.lists(st.integers(2, 6), min_size=1, max_size=4),
    layers=st.integers(1, 3),
    experts=st.integers(4, 9),
    top_k=st.integers(2, 4),
)
def test_any_trace_comes_back(
    name: str,
    seed: int,
    lengths: list[int],
    layers: int,
    experts: int,
    top_k: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("any")
    (folder / "source").mkdir()
    drawn = draw(seed, lengths, layers, experts, top_k)
    came_back(name, WRITERS[name](folder / "source", drawn), folder / "out", drawn)


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_overwritten_and_nothing_half_written(name: str, tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    source = WRITERS[name](tmp_path / "source", SMALL)
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "mine.txt").write_text("mine", encoding="utf-8")
    with pytest.raises(SettingError, match="exists already"):
        import_source(ImportConfig(source=str(source), out=str(tmp_path / "there"), **options_of(name, SMALL)))
    assert [path.name for path in (tmp_path / "there").iterdir()] == ["mine.txt"]
    with pytest.raises((TraceError, SettingError)):  # ids, counts or logits beyond 3 experts
        import_source(ImportConfig(source=str(source), out=str(tmp_path / "new"), experts=3, **options_of(name, SMALL)))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source", "there"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "content", [b"", b"\n\n", b"\x00" * 64, b"PK\x03\x04 no zip", b"\x1f\x8b no gzip", b"{]", b"\xff"]
)
def test_junk_is_refused_in_one_sentence(name: str, content: bytes, tmp_path: Path) -> None:
    source = tmp_path / "junk"
    source.write_bytes(content)
    with pytest.raises(TraceError) as caught:
        import_source(ImportConfig(source=str(source), out=str(tmp_path / "out"), format=name))
    assert "junk" in str(caught.value)
    assert "\n" not in str(caught.value)
    with pytest.raises(TraceError, match="no known format"):
        import_source(ImportConfig(source=str(source), out=str(tmp_path / "out")))
    assert [path.name for path in tmp_path.iterdir()] == ["junk"]


@pytest.mark.parametrize("name", NAMES)
def test_the_result_says_what_it_is(name: str, tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    source = WRITERS[name](tmp_path / "source", SMALL)
    config = ImportConfig(source=str(source), out=str(tmp_path / "out"), model="mine", **options_of(name, SMALL))
    result = import_source(config)
    value = json.loads(json.dumps(result.to_json()))
    assert {"sequences", "tokens", "rows_read", "rows_dropped", "topology", "format", "notes"} <= set(value)
    assert result.header["model"] == "mine"
    assert result.header["recording"]["format"] == name
    assert str(tmp_path) not in json.dumps(result.header)  # no path of one machine in what may be shared
