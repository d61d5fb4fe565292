"""Hidden states in a trace: what the gates saw, token by token, and what a trace that declares them is held to."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from foregate.collect import shard, tiny_models
from foregate.collect.architectures import find_moe_modules
from foregate.collect.checks import check_trace
from foregate.collect.collection import CollectConfig, collect
from foregate.collect.errors import ModelError, TraceError
from foregate.collect.gates import find_gates
from foregate.collect.merge import merge
from foregate.collect.recorder import RoutingRecorder
from foregate.collect.sequence import split_parts
from foregate.collect.topology import MoeTopology
from foregate.collect.trace import SequenceRouting, Trace, TraceHeader
from foregate.collect.writer import TraceWriter

SIZE = 32  # of the tiny models


@pytest.mark.parametrize("name", ["qwen3_moe", "gemma4", "inkling2_loop"])
def test_recorded_is_what_the_gates_saw_and_the_hooks_leave(name) -> None:
    model = tiny_models.build(name)
    gates = find_gates(model, find_moe_modules(model))
    seen: dict[str, list[torch.Tensor]] = {gate.name: [] for gate in gates}
    handles = [
        model.get_submodule(gate).register_forward_pre_hook(lambda module, args, into=into: into.append(args[0]))
        for gate, into in seen.items()
    ]
    with torch.no_grad(), RoutingRecorder(model, hidden=True) as recorder:
        model(input_ids=torch.arange(4, 22).view(2, 9))
        routing = recorder.take()
    for handle in handles:
        handle.remove()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    for gate, layer in zip(gates, routing, strict=True):
        wanted = seen[gate.name].pop(0).reshape(-1, SIZE)  # a looped gate is called once for each of its layers
        np.testing.assert_array_equal(layer.hidden, wanted.half().numpy())


def test_recorded_as_before_without_being_asked() -> None:
    model = tiny_models.build("qwen3_moe")
    ids = torch.arange(4, 22).view(2, 9)
    taken = []
    for hidden in (False, True):
        with torch.no_grad(), RoutingRecorder(model, hidden=hidden) as recorder:
            model(input_ids=ids)
            taken.append(recorder.take())
    for plain, more in zip(*taken, strict=True):
        assert plain.hidden is None
        np.testing.assert_array_equal(plain.experts, more.experts)
        np.testing.assert_array_equal(plain.weights, more.weights)


def test_refuses_a_router_without_a_gate() -> None:
    model = tiny_models.build("zaya")
    with pytest.raises(ModelError, match="no gate that is one matrix"):
        RoutingRecorder(model, hidden=True)
    RoutingRecorder(model)


@pytest.mark.parametrize("generate", [0, 3])
def test_a_run_stores_what_each_token_alone_would_give(generate, tmp_path) -> None:
    model = tiny_models.build("qwen3_moe")
    model.save_pretrained(tmp_path / "model")
    tiny_models.tokenizer().save_pretrained(tmp_path / "model")
    texts = ["four words stand here", "two words", "one"]
    (tmp_path / "texts.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    config = CollectConfig(
        model=str(tmp_path / "model"),
        data=str(tmp_path / "texts.jsonl"),
        out=str(tmp_path / "trace"),
        generate=generate,
        hidden=True,
        device="cpu",
    )
    collect(config)
    assert list(check_trace(config.out)) == []
    rows = list(Trace.open(config.out))
    assert Trace.open(config.out).header.hidden == "gates"
    assert len(rows) == 3
    for row in rows:  # batched and padded there, alone here
        with torch.no_grad(), RoutingRecorder(model, hidden=True) as recorder:
            model(input_ids=torch.tensor(row.token_ids, dtype=torch.int64)[None])
            alone = np.concatenate([layer.hidden for layer in recorder.take()], axis=1)
        assert row.hidden.dtype == np.float16
        assert row.hidden.shape == (row.num_tokens, 2 * SIZE)
        np.testing.assert_allclose(row.hidden, alone, atol=5e-3)


def row_of(name: str, num_tokens: int = 6) -> SequenceRouting:
    """Draw a row of 2 layers of 8 experts, hidden size 4."""
    rng = np.random.default_rng(len(name))
    experts = np.argsort(rng.random((num_tokens, 2, 8)))[..., :2].reshape(num_tokens, 4).astype(np.int16)
    hidden = rng.normal(size=(num_tokens, 8)).astype(np.float16)
    return SequenceRouting(sequence=name, experts=experts, hidden=hidden)


TOPOLOGY = replace(MoeTopology.uniform(2, 8, 2), hidden_size=4)


def test_hidden_states_are_held_to_the_header(tmp_path) -> None:
    row = row_of("a")
    spoiled = row.hidden.copy()
    spoiled[3, 1] = np.inf
    with TraceWriter(tmp_path / "t", TraceHeader(topology=TOPOLOGY, hidden="gates")) as writer:
        for reason, bad in [
            ("it has no hidden states, the header declares gates", replace(row, hidden=None)),
            (r"its hidden states are \(6, 7\), expected \(6, 8\)", replace(row, hidden=row.hidden[:, 1:])),
            ("infinite or no numbers at token 3; float16 ends at 65504", replace(row, hidden=spoiled)),
            ("infinite or no numbers", replace(row, hidden=np.full((6, 8), 7e4, np.float32))),
        ]:
            with pytest.raises(TraceError, match=reason):
                writer.write(bad)
        writer.write(row)
    (read,) = Trace.open(tmp_path / "t")
    np.testing.assert_array_equal(read.hidden, row.hidden)
    with (
        TraceWriter(tmp_path / "u", TraceHeader(topology=TOPOLOGY)) as writer,
        pytest.raises(TraceError, match="it has hidden states, the header declares none"),
    ):
        writer.write(row)


def test_parts_and_merges_keep_them(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("foregate.collect.sequence.PART_TOKENS", 4)
    for name in ("a", "bb"):
        with TraceWriter(tmp_path / name, TraceHeader(topology=TOPOLOGY, hidden="gates")) as writer:
            writer.write(row_of(name, 10))
    assert [part.hidden.shape for part in split_parts(row_of("a", 10))] == [(4, 8), (4, 8), (2, 8)]
    merge([tmp_path / "a", tmp_path / "bb"], tmp_path / "both")
    for read, name in zip(Trace.open(tmp_path / "both").sequences(), ("a", "bb"), strict=True):
        np.testing.assert_array_equal(read.hidden, row_of(name, 10).hidden)
    with TraceWriter(tmp_path / "plain", TraceHeader(topology=TOPOLOGY)) as writer:
        writer.write(replace(row_of("ccc"), hidden=None))
    with pytest.raises(TraceError, match="hidden"):
        merge([tmp_path / "a", tmp_path / "plain"], tmp_path / "mixed")


def test_a_column_that_arrow_cannot_count_is_not_written(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(shard, "MAX_ENTRIES", 47)
    with pytest.raises(TraceError, match="column of 48 entries does not fit a shard, at most 47 do"):
        shard.write_shard(tmp_path / "s.parquet", [row_of("a")], hidden=True)
    assert not (tmp_path / "s.parquet").exists()
