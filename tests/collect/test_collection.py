"""Whole recording runs on tiny models: what is in the trace is what the model did, whatever happened on the way."""

from __future__ import annotations

import errno
import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from foregate.collect import tiny_models
from foregate.collect.architectures import model_fingerprint, topology_of
from foregate.collect.checks import check_trace
from foregate.collect.collection import CollectConfig, collect
from foregate.collect.errors import DataError, ModelError, SettingError, TraceError
from foregate.collect.pretrained import load_pretrained, tokenizer_fingerprint
from foregate.collect.recorder import RoutingRecorder
from foregate.collect.trace import SequenceRouting, Trace
from transformers import LlamaConfig, LlamaForCausalLM

TEXTS = [f"{'word ' * (number % 7)}number {number}." for number in range(40)]


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    """Save tiny models with their tokenizer, as checkpoints."""
    folder = tmp_path_factory.mktemp("models")
    for name in ("qwen3_moe", "switch_transformers", "deepseek_v3"):
        tiny_models.build(name).save_pretrained(folder / name)
        tiny_models.tokenizer(add_eos=name.startswith("switch")).save_pretrained(folder / name)
    return folder


@pytest.fixture
def config(models, tmp_path) -> CollectConfig:
    """Give settings over 40 short texts."""
    data = tmp_path / "texts.jsonl"
    rows = [{"text": text, "answer": f"answer {n % 3}", "topic": f"t{n % 2}"} for n, text in enumerate(TEXTS)]
    data.write_text("\n".join(map(json.dumps, rows)))
    return CollectConfig(
        model=str(models / "qwen3_moe"),
        data=str(data),
        out=str(tmp_path / "trace"),
        category_column="topic",
        batch_size=4,
        device="cpu",
    )


def rows_of(config: CollectConfig) -> list[SequenceRouting]:
    assert list(check_trace(config.out)) == []
    return list(Trace.open(config.out))


def assert_equal_rows(left: list[SequenceRouting], right: list[SequenceRouting]) -> None:
    for a, b in zip(left, right, strict=True):
        assert (a.sequence, a.stack) == (b.sequence, b.stack)
        for name in ("token_ids", "experts", "weights"):
            np.testing.assert_array_equal(getattr(a, name), getattr(b, name), err_msg=f"{a.sequence} {name}")


def test_a_plain_run(config) -> None:
    seen = []
    result = collect(config, progress=lambda sequences, tokens: seen.append((sequences, tokens)))
    rows = rows_of(config)
    assert result.sequences == result.new_sequences == len(rows) == len(TEXTS)
    assert result.tokens == result.new_tokens == sum(map(len, TEXTS))
    assert result.trace == Path(config.out)
    assert [sum(values) for values in zip(*seen, strict=True)] == [result.sequences, result.tokens]
    tokenizer = tiny_models.tokenizer()
    model, _ = load_pretrained(config.model)
    with torch.no_grad(), RoutingRecorder(model) as recorder:
        for number, (text, row) in enumerate(zip(TEXTS, rows, strict=True)):
            assert row.sequence == row.source == f"texts.jsonl:{number}"
            assert (row.category, row.group, row.prompt_tokens, row.text) == (f"t{number % 2}", None, None, None)
            assert tokenizer.decode(row.token_ids) == text
            model(input_ids=torch.from_numpy(row.token_ids.astype(np.int64))[None])
            alone = recorder.take()
            np.testing.assert_array_equal(row.experts, np.concatenate([layer.experts for layer in alone], axis=1))
            weights = np.concatenate([layer.weights for layer in alone], axis=1)
            np.testing.assert_allclose(row.weights, weights, atol=2e-3)


def test_the_header_says_what_was_recorded(config) -> None:
    collect(replace(config, seed=5, generate=2, max_sequences=3))
    header = Trace.open(config.out).header
    model, tokenizer = load_pretrained(config.model)
    assert header.topology == topology_of(model)
    assert header.model == "qwen3_moe"
    assert header.model_fingerprint == model_fingerprint(model.config)
    assert header.tokenizer_fingerprint == tokenizer_fingerprint(tokenizer)
    assert header.vocab_size == tiny_models.VOCAB_SIZE
    assert header.dtype == "float32"
    assert header.versions["torch"] == torch.__version__
    assert header.weights == "normalized"
    assert header.generation == {"max_new_tokens": 2, "temperature": 0.0}
    assert header.recording["data"] == "texts.jsonl"
    assert header.seed == 5


def test_weights_that_do_not_sum_to_one_are_declared_so(config, models) -> None:
    collect(replace(config, model=str(models / "deepseek_v3"), max_sequences=2))
    assert Trace.open(config.out).header.weights == "finite"
    assert rows_of(config)


def test_long_texts_are_split_or_cut(config) -> None:
    collect(replace(config, max_tokens=10))
    rows = rows_of(config)
    assert max(row.num_tokens for row in rows) == 10
    first = [row for row in rows if row.source == "texts.jsonl:6"]
    assert [row.sequence for row in first] == [f"texts.jsonl:6#{i}" for i in range(4)]
    assert {row.group for row in first} == {"texts.jsonl:6"}
    assert tiny_models.tokenizer().decode(np.concatenate([row.token_ids for row in first])) == TEXTS[6]
    cut = replace(config, max_tokens=10, overflow="cut", out=config.out + " cut")
    collect(cut)
    assert [row.sequence for row in rows_of(cut)] == [f"texts.jsonl:{i}" for i in range(len(TEXTS))]


def test_max_tokens_leaves_room_for_the_model(config, models) -> None:
    model = tiny_models.build("qwen3_moe", max_position_embeddings=12)
    loaded = (model, tiny_models.tokenizer())
    collect(replace(config, max_tokens=100, generate=4, max_sequences=5), loaded=loaded)
    assert max(row.num_tokens for row in rows_of(config)) <= 12
    with pytest.raises(SettingError, match="generate must be less than the model's 12 positions, got 12"):
        collect(replace(config, generate=12, out=config.out + "2"), loaded=loaded)


def test_texts_are_stored_only_when_asked_for(config) -> None:
    collect(replace(config, with_text=True, max_sequences=3))
    assert [row.text for row in rows_of(config)] == TEXTS[:3]


class Stop(Exception):
    """Stands for whatever ends a run early."""


@pytest.mark.parametrize("settings", [{}, {"generate": 3, "temperature": 1.0}], ids=["plain", "drawn"])
def test_an_interrupted_and_resumed_run_equals_an_uninterrupted_one(config, monkeypatch, settings) -> None:
    monkeypatch.setattr("foregate.collect.batches.WINDOW_BATCHES", 2)
    config = replace(config, shard_rows=5, **settings)
    whole = replace(config, out=config.out + " whole")
    collect(whole)
    for windows in (2, 3):
        calls = []

        def stop(sequences: int, tokens: int, calls=calls, windows=windows) -> None:
            calls.append(sequences)
            if len(calls) == windows:
                raise Stop

        with pytest.raises(Stop):
            collect(replace(config, resume=True), progress=stop)
        assert list(check_trace(config.out)) == []
    kept = len(rows_of(config))
    assert 0 < kept < len(TEXTS)
    shard = sorted(Path(config.out).glob("shard-*"))[-1]
    shard.unlink()  # as if the last shard had not been finished
    kept = len(rows_of(config))
    result = collect(replace(config, resume=True))
    assert (result.sequences, result.new_sequences) == (len(TEXTS), len(TEXTS) - kept)
    assert_equal_rows(rows_of(config), rows_of(whole))
    result = collect(replace(config, resume=True))
    assert (result.sequences, result.new_sequences, result.new_tokens) == (len(TEXTS), 0, 0)


def test_an_existing_trace_is_refused_and_other_settings_too(config) -> None:
    collect(replace(config, max_sequences=3))
    with pytest.raises(TraceError, match="holds a trace already"):
        collect(replace(config, model="nobody/nothing"))  # said before a model is loaded
    with pytest.raises(TraceError, match="recorded with recording"):
        collect(replace(config, resume=True, max_tokens=9))
    assert collect(replace(config, resume=True, max_sequences=5)).sequences == 5


def test_generated_tokens_are_recorded(config) -> None:
    collect(replace(config, generate=5, max_sequences=6))
    model, _ = load_pretrained(config.model)
    for row, text in zip(rows_of(config), TEXTS, strict=False):
        assert row.prompt_tokens == len(text)
        ids = torch.from_numpy(row.token_ids.astype(np.int64))[None]
        new = model.generate(
            ids[:, : row.prompt_tokens],
            attention_mask=torch.ones(1, row.prompt_tokens, dtype=torch.long),
            max_new_tokens=5,
            do_sample=False,
        )[0]
        new = new[: -1 if len(new) else None]  # the last token was never fed back
        assert row.token_ids.tolist() == new.tolist()
        with torch.no_grad(), RoutingRecorder(model) as recorder:
            model(input_ids=ids)
            alone = np.concatenate([layer.experts for layer in recorder.take()], axis=1)
        np.testing.assert_array_equal(row.experts, alone)


def test_drawn_tokens_depend_on_the_seed_alone(config) -> None:
    runs = []
    for number, seed in enumerate((1, 1, 2)):
        torch.manual_seed(number)
        run = replace(config, out=f"{config.out} {number}", seed=seed, generate=6, temperature=1.0, max_sequences=4)
        collect(run)
        runs.append([row.token_ids.tolist() for row in rows_of(run)])
    assert runs[0] == runs[1] != runs[2]


def test_an_encoder_decoder_gives_two_rows(config, models) -> None:
    config = replace(config, model=str(models / "switch_transformers"), target_column="answer")
    result = collect(config)
    rows = rows_of(config)
    assert (result.sequences, len(rows)) == (len(TEXTS), 2 * len(TEXTS))
    tokenizer = tiny_models.tokenizer()
    model, _ = load_pretrained(config.model)
    for number, (encoder, decoder) in enumerate(zip(rows[::2], rows[1::2], strict=True)):
        assert (encoder.stack, decoder.stack) == ("encoder", "decoder")
        assert encoder.sequence == decoder.sequence == f"texts.jsonl:{number}"
        assert tokenizer.decode(encoder.token_ids) == TEXTS[number] + "</s>"
        assert decoder.token_ids[0] == 0  # the start token; the end token of the target is never fed
        assert tokenizer.decode(decoder.token_ids[1:]) == f"answer {number % 3}"
        inputs = (torch.from_numpy(row.token_ids.astype(np.int64))[None] for row in (encoder, decoder))
        with torch.no_grad(), RoutingRecorder(model) as recorder:
            model(**dict(zip(("input_ids", "decoder_input_ids"), inputs, strict=True)))
            alone = recorder.take()
        np.testing.assert_array_equal(encoder.experts, np.concatenate([layer.experts for layer in alone[:2]], axis=1))
        np.testing.assert_array_equal(decoder.experts, np.concatenate([layer.experts for layer in alone[2:]], axis=1))


def test_an_encoder_decoder_without_targets_and_with_generation(config, models) -> None:
    config = replace(config, model=str(models / "switch_transformers"), max_sequences=5)
    collect(config)
    assert [row.num_tokens for row in rows_of(config) if row.stack == "decoder"] == [1] * 5
    config = replace(config, out=config.out + " generated", generate=4)
    collect(config)
    decoder = [row for row in rows_of(config) if row.stack == "decoder"]
    assert all(1 <= row.num_tokens <= 4 and row.prompt_tokens == 1 for row in decoder)
    assert any(row.num_tokens > 1 for row in decoder)
    assert all(row.prompt_tokens is None for row in rows_of(config) if row.stack == "encoder")


def test_dropped_tokens_are_in_the_trace(config) -> None:
    loaded = (tiny_models.build("switch_transformers", expert_capacity=1), tiny_models.tokenizer(add_eos=True))
    collect(replace(config, max_sequences=8), loaded=loaded)
    rows = rows_of(config)
    assert all((row.experts == -1).any() for row in rows if row.stack == "encoder")
    assert all(((row.experts == -1) == (row.weights == 0)).all() for row in rows)


def test_a_full_disk_leaves_a_valid_trace_that_can_be_resumed(config, monkeypatch) -> None:
    config = replace(config, shard_rows=5)
    write_table, calls = pq.write_table, []

    def full(table, file, **options):
        calls.append(1)
        if len(calls) > 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write_table(table, file, **options)

    monkeypatch.setattr(pq, "write_table", full)
    with pytest.raises(OSError, match="No space left"):
        collect(config)
    assert len(rows_of(config)) == 10
    monkeypatch.setattr(pq, "write_table", write_table)
    assert collect(replace(config, resume=True)).sequences == len(TEXTS)
    assert [row.sequence for row in rows_of(config)] == [f"texts.jsonl:{i}" for i in range(len(TEXTS))]


def test_a_model_that_cannot_be_used_leaves_nothing(config, models, tmp_path) -> None:
    def refused(match: str, **settings: str) -> None:
        with pytest.raises(ModelError, match=match) as raised:
            collect(replace(config, **settings))
        assert "\n" not in str(raised.value)
        assert not Path(config.out).exists()

    refused("cannot be loaded as a transformers model", model=str(tmp_path / "absent"))
    refused("cannot be loaded as a transformers model", model="nobody/nothing")
    dense = LlamaConfig(
        vocab_size=320, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    LlamaForCausalLM(dense).save_pretrained(tmp_path / "dense")
    tiny_models.tokenizer().save_pretrained(tmp_path / "dense")
    refused("LlamaForCausalLM has no MoE layers that foregate knows", model=str(tmp_path / "dense"))
    truncated = tmp_path / "truncated"
    truncated.mkdir()
    for file in (models / "qwen3_moe").iterdir():
        (truncated / file.name).write_bytes(file.read_bytes()[: 5000 if file.suffix == ".safetensors" else None])
    refused("cannot be loaded as a transformers model", model=str(truncated))
    small = tiny_models.build("qwen3_moe", num_hidden_layers=1)
    small.config.num_hidden_layers = 2
    small.save_pretrained(tmp_path / "small")
    tiny_models.tokenizer().save_pretrained(tmp_path / "small")
    refused(r"lacks \d+ of its weights, as model\.layers\.1", model=str(tmp_path / "small"))
    with pytest.raises(ModelError, match=r"The tokenizer gave id \d+ for .* the model embeds ids 0\.\.99"):
        collect(config, loaded=(tiny_models.build("qwen3_moe", vocab_size=100), tiny_models.tokenizer()))


def test_missing_or_empty_data_fails_before_the_model_is_loaded(config, tmp_path) -> None:
    (tmp_path / "empty.txt").write_text("\n \n")
    with pytest.raises(DataError, match="holds no text; give another --data"):
        collect(replace(config, data=str(tmp_path / "empty.txt"), model="nobody/nothing"))
    with pytest.raises(DataError, match="does not exist"):
        collect(replace(config, data=str(tmp_path / "absent.txt"), model="nobody/nothing"))
    assert not Path(config.out).exists()


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"generate": -1}, "generate must be at least 0"),
        ({"max_sequences": 0}, "max_sequences must be at least 1"),
        ({"temperature": -1.0}, "temperature must be 0 or more"),
        ({"temperature": 1.0}, "give --generate N"),
        ({"overflow": "wrap"}, "overflow must be one of split, cut, got 'wrap'"),
        ({"dtype": "int8"}, "dtype must be one of"),
        ({"device": "abacus"}, "device must be auto, cpu or one that torch can use, got 'abacus'"),
    ],
)
def test_settings_out_of_range(config, settings, match) -> None:
    with pytest.raises(SettingError, match=match):
        collect(replace(config, **settings))


def test_other_arithmetic(config) -> None:
    collect(replace(config, dtype="bfloat16", max_sequences=4))
    assert Trace.open(config.out).header.dtype == "bfloat16"
    assert len(rows_of(config)) == 4


@pytest.mark.parametrize(
    "name", ["llama4", "longcat_flash", "nllb_moe", "openai_privacy_filter", "qwen3_omni_moe", "step3p7"]
)
def test_models_of_any_class_are_collected(config, tmp_path, name) -> None:
    """Of images and text, without a head for language, or with a part that is for text only."""
    model = tiny_models.build(name)
    model.save_pretrained(tmp_path / "model")
    tiny_models.tokenizer(add_eos=model.config.is_encoder_decoder).save_pretrained(tmp_path / "model")
    loaded, _ = load_pretrained(str(tmp_path / "model"))
    assert type(loaded) is type(model)
    config = replace(config, model=str(tmp_path / "model"), max_sequences=4, target_column=None)
    collect(config)
    rows = rows_of(config)
    assert {row.sequence for row in rows} == {row.sequence for row in rows if row.num_tokens > 1}
    assert Trace.open(config.out).header.topology.same_routing(topology_of(model))
    skipped = any((row.experts < 0).any() for row in rows)
    assert skipped == (name == "longcat_flash"), "identity experts alone are -1 where no capacity is reached"
