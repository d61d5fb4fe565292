"""Prompts and generation in padded batches: each token has the ids of its sequence alone, without padding or cache.

All models run in float64, where another order of summation moves no near tie.
"""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from foregate.collect import tiny_models
from foregate.collect.architectures import topology_of
from foregate.collect.batches import Piece
from foregate.collect.checks import check_trace
from foregate.collect.collection import CollectConfig, collect
from foregate.collect.corpora import Document
from foregate.collect.passes import Generation, Passes
from foregate.collect.recorder import RoutingRecorder
from foregate.collect.sequence import SequenceRouting
from foregate.collect.trace import Trace

LENGTHS = (3, 11, 1, 6)
NEW_TOKENS = 7

# attention of every kind, first dense blocks, dense blocks in between, state spaces between attention
CAUSAL = {
    "qwen3_moe": {},
    "mixtral": {},
    "gpt_oss": {},
    "granitemoe": {},
    "deepseek_v3": {},
    "ernie4_5_moe": {},
    "qwen2_moe": {"num_hidden_layers": 4, "decoder_sparse_step": 2},
    "jamba": {},
    "llama4": {"text_config": {"num_hidden_layers": 4, "moe_layers": [1, 3]}},
}
PAIRED = ("switch_transformers", "nllb_moe")


def double(name: str, **overrides: object):
    return exact(tiny_models.build(name, **overrides))


def exact(model):
    """Put a model into float64; grouped products know none, so experts run one by one."""
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    return model.double().eval()


def mixed():
    """Build a model whose layers differ: 8 experts top-3, 6 experts top-2, 8 experts top-3 again, 5 experts top-1."""
    model = double("qwen3_moe", num_hidden_layers=4)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        for index, num_experts, top_k in ((1, 6, 2), (3, 5, 1)):
            config = copy.deepcopy(model.config)
            config.num_experts, config.num_experts_per_tok = num_experts, top_k
            config.num_local_experts = num_experts
            block = type(model.model.layers[index].mlp)(config)
            for parameter in block.parameters():
                torch.nn.init.normal_(parameter, std=0.3)
            model.model.layers[index].mlp = block
    return exact(model)


def pieces(lengths=LENGTHS, target: bool = False) -> list[Piece]:
    generator = np.random.default_rng(0)
    return [
        Piece(
            str(number),
            generator.integers(4, 260, length).tolist(),
            generator.integers(4, 260, 1 + number).tolist() if target else None,
            Document(source=str(number), text=""),
            None,
        )
        for number, length in enumerate(lengths)
    ]


def recorded(model, generation: Generation | None, batch: list[Piece]) -> list[list[SequenceRouting]]:
    """Record a batch as `foregate collect` does."""
    with RoutingRecorder(model) as recorder:
        return Passes(model, recorder, tiny_models.tokenizer(), generation)(batch, 0)


def alone(model, **token_ids: np.ndarray) -> list[np.ndarray]:
    """Give each MoE layer's ids of one sequence, by one forward without cache, padding or mask."""
    inputs = {name: torch.from_numpy(ids.astype(np.int64))[None] for name, ids in token_ids.items()}
    with torch.no_grad(), RoutingRecorder(model) as recorder:
        model(**inputs, use_cache=False)
        return [layer.experts for layer in recorder.take()]


def assert_causal_rows_are_those_of_single_sequences(model, generation: Generation | None) -> list[SequenceRouting]:
    batch = pieces()
    rows = [row for (row,) in recorded(model, generation, batch)]
    for piece, row in zip(batch, rows, strict=True):
        assert row.token_ids[: len(piece.token_ids)].tolist() == piece.token_ids
        assert row.prompt_tokens == (len(piece.token_ids) if generation else None)
        for got, wanted in zip(
            row.layer_experts(topology_of(model)), alone(model, input_ids=row.token_ids), strict=True
        ):
            np.testing.assert_array_equal(got, wanted, err_msg=row.sequence)
    return rows


@pytest.mark.parametrize("name", CAUSAL)
def test_a_batch_padded_on_the_right(name) -> None:
    rows = assert_causal_rows_are_those_of_single_sequences(double(name, **CAUSAL[name]), None)
    assert [row.num_tokens for row in rows] == list(LENGTHS)


@pytest.mark.parametrize("name", CAUSAL)
def test_a_generation_padded_on_the_left(name) -> None:
    model = double(name, **CAUSAL[name])
    rows = assert_causal_rows_are_those_of_single_sequences(model, Generation(max_new_tokens=NEW_TOKENS))
    assert all(len(row.token_ids) <= row.prompt_tokens + NEW_TOKENS - 1 for row in rows)
    assert any(len(row.token_ids) > row.prompt_tokens + 1 for row in rows)
    for row in rows:  # the tokens are those that the sequence alone would have generated
        prompt = torch.from_numpy(row.token_ids[: row.prompt_tokens].astype(np.int64))[None]
        with torch.no_grad():
            new = model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=NEW_TOKENS,
                do_sample=False,
                use_cache=False,
                pad_token_id=0,
            )[0, row.prompt_tokens : -1]
        assert row.token_ids[row.prompt_tokens :].tolist() == new.tolist()


def test_layers_of_different_size_and_top_k() -> None:
    model = mixed()
    topology = topology_of(model)
    assert [(layer.num_experts, layer.top_k) for layer in topology.layers] == [(8, 3), (6, 2), (8, 3), (5, 1)]
    for generation in (None, Generation(max_new_tokens=NEW_TOKENS)):
        rows = assert_causal_rows_are_those_of_single_sequences(model, generation)
        assert {row.experts.shape[1] for row in rows} == {9}


def test_a_trace_of_layers_of_different_size_and_top_k(tmp_path) -> None:
    (tmp_path / "texts.txt").write_text("One.\n\nTwo and two.\n\nThree, then four.\n")
    config = CollectConfig(
        model="mixed", data=str(tmp_path / "texts.txt"), out=str(tmp_path / "t"), generate=4, device="cpu"
    )
    model = mixed()
    collect(config, loaded=(model, tiny_models.tokenizer()))
    assert list(check_trace(config.out)) == []
    trace = Trace.open(config.out)
    assert trace.topology == topology_of(model)
    for row in trace:
        for got, wanted in zip(row.layer_experts(trace.topology), alone(model, input_ids=row.token_ids), strict=True):
            np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("name", ["deepseek_v3", "ernie4_5_moe", "qwen2_moe", "jamba", "llama4"])
def test_dense_blocks_are_no_moe_layers(name) -> None:
    model = double(name, **CAUSAL[name])
    blocks = [layer.block for layer in topology_of(model).layers]
    assert len(blocks) < model.config.get_text_config().num_hidden_layers
    assert (
        blocks
        == {
            "deepseek_v3": [1, 2],
            "ernie4_5_moe": [1, 2],
            "qwen2_moe": [1, 3],
            "jamba": [1, 3],
            "llama4": [1, 3],
        }[name]
    )


def test_a_sequence_that_ends_early_keeps_what_was_fed(monkeypatch) -> None:
    model = double("mixtral")
    whole = [row for (row,) in recorded(model, Generation(max_new_tokens=NEW_TOKENS), pieces())]
    new = [row.token_ids[row.prompt_tokens :].tolist() for row in whole]
    end = new[1][2]
    wanted = [tokens[: tokens.index(end)] if end in tokens else tokens for tokens in new]
    assert any(map(lambda pair: len(pair[0]) < len(pair[1]), zip(wanted, new, strict=True)))
    monkeypatch.setattr(model.generation_config, "eos_token_id", end)
    rows = assert_causal_rows_are_those_of_single_sequences(model, Generation(max_new_tokens=NEW_TOKENS))
    assert [row.token_ids[row.prompt_tokens :].tolist() for row in rows] == wanted


@pytest.mark.parametrize("how", ["target", "generated", "start alone"])
@pytest.mark.parametrize("name", PAIRED)
def test_an_encoder_decoder(name, how) -> None:
    model = double(name)
    topology = topology_of(model)
    generation = Generation(max_new_tokens=NEW_TOKENS) if how == "generated" else None
    batch = pieces(target=how == "target")
    for piece, (encoder, decoder) in zip(batch, recorded(model, generation, batch), strict=True):
        assert (encoder.stack, decoder.stack) == ("encoder", "decoder")
        assert encoder.token_ids.tolist() == piece.token_ids
        assert (encoder.prompt_tokens, decoder.prompt_tokens) == (None, 1 if generation else None)
        if how == "target":
            assert decoder.token_ids[1:].tolist() == piece.target_ids[:-1]
        elif how == "start alone":
            assert decoder.num_tokens == 1
        wanted = alone(model, input_ids=encoder.token_ids, decoder_input_ids=decoder.token_ids)
        got = encoder.layer_experts(topology) + decoder.layer_experts(topology)
        for left, right in zip(got, wanted, strict=True):
            np.testing.assert_array_equal(left, right, err_msg=piece.sequence)


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_scores_of_prompt_and_generation_are_those_of_the_sequence_alone(tmp_path, name) -> None:
    (tmp_path / "texts.txt").write_text("One.\n\nTwo and two.\n\nThree, then four.\n")
    config = CollectConfig(
        model=name, data=str(tmp_path / "texts.txt"), out=str(tmp_path / "t"), generate=4, scores=True, device="cpu"
    )
    model = double(name)
    collect(config, loaded=(model, tiny_models.tokenizer()))
    assert list(check_trace(config.out)) == []  # among others: the top-k of the scores gives the ids
    trace = Trace.open(config.out)
    assert trace.header.scores == "selection"
    for row in trace:
        ids = torch.from_numpy(row.token_ids.astype(np.int64))[None]
        with torch.no_grad(), RoutingRecorder(model, scores=True) as recorder:
            model(input_ids=ids, use_cache=False)
            wanted = np.concatenate([layer.scores for layer in recorder.take()], axis=1)
        np.testing.assert_allclose(row.scores, wanted, rtol=1e-5, atol=1e-6)
    resumed = collect(replace(config, resume=True), loaded=(model, tiny_models.tokenizer()))
    assert (resumed.sequences, resumed.new_sequences) == (3, 0)
