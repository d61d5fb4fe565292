"""Verifying and generating: bit-identical to the resident model, and what is reported where it is not."""

from __future__ import annotations

import io
import json
import shutil
import sys
import tempfile

import pytest
import torch
from foregate.cli import main as program
from foregate.collect import tiny_models
from foregate.collect.errors import ModelError, SettingError
from foregate.runtime import models, reference
from foregate.runtime.inflate import inflate
from foregate.runtime.manifest import MANIFEST
from foregate.runtime.pack import pack
from foregate.runtime.reference import resident_from_store
from foregate.runtime.store import ExpertStore, checksum_of
from foregate.runtime.verify import max_abs_diff, same_bits, verify
from foregate.runtime.walk import walk
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("verify")
    tiny_models.build("qwen3_moe").save_pretrained(folder / "model")
    tiny_models.tokenizer().save_pretrained(folder / "model")
    pack(folder / "model", folder / "store")
    return folder


@pytest.fixture
def copied(folder, tmp_path):
    return shutil.copytree(folder / "store", tmp_path / "store")


def change_weight(folder, *, honest):
    """Change a byte of every block of the first layer's file; an honest store admits it in its checksums."""
    store = ExpertStore.open(folder)
    manifest = json.loads((folder / MANIFEST).read_text())
    for expert in range(8):
        segment = store.segments(expert)[0]
        with open(store.files[0], "r+b") as file:
            file.seek(segment.offset)
            block = bytearray(file.read(segment.nbytes))
            block[3] ^= 0x02  # the exponent of the first weight
            file.seek(segment.offset)
            file.write(block)
        if honest:
            manifest["layers"][0]["checksums"][expert] = checksum_of(block)
    (folder / MANIFEST).write_text(json.dumps(manifest))


@pytest.mark.parametrize("name", ["deepseek_v2", "gpt_oss", "mixtral", "qwen3_moe", "switch_transformers"])
def test_families_are_bit_identical_without_a_tokenizer(name, tmp_path):
    tiny_models.build(name).to(torch.bfloat16).save_pretrained(tmp_path / "model")
    pack(tmp_path / "model", tmp_path / "store")
    for witness in (None, tmp_path / "model"):
        report = verify(tmp_path / "store", tokens=10, slots=4, reference=witness)
        assert report.identical, report
        assert report.max_abs_diff == 0.0
        assert report.first_difference is None
        assert report.misses > report.slots


@pytest.mark.parametrize("name", models.names())
def test_the_mini_models_are_bit_identical_at_a_quarter_and_a_tenth(name, tmp_path):
    pack(name, tmp_path / "store")
    for slots in (0.25, 0.1):
        report = verify(tmp_path / "store", slots=slots, reference=name)
        assert report.identical, report
        assert report.tokens >= 64
        assert report.slots <= slots * report.experts + 1
        assert report.misses > 0


@pytest.mark.parametrize("name", sorted(tiny_models.FORMS))
def test_the_resident_model_of_a_store_is_the_original(name, tmp_path):
    original = tiny_models.build(name)
    original.generation_config.max_length = 77
    original.save_pretrained(tmp_path / "model")
    rebuilt = resident_from_store(pack(tmp_path / "model", tmp_path / "store"))
    assert rebuilt.generation_config.max_length == 77
    wanted = original.state_dict()
    assert rebuilt.state_dict().keys() == wanted.keys()
    if name == "longcat_flash":  # rows of its identity experts, which nothing reads, are in no block
        for key in [key for key in wanted if key.endswith("experts.gate_up_proj")]:
            wanted[key] = torch.cat([wanted[key][:8], torch.zeros_like(wanted[key][8:])])
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in rebuilt.state_dict().items())
    assert not hasattr(rebuilt.config, "quantization_config")


@pytest.mark.parametrize("name", ["qwen3_moe", "switch_transformers"])
def test_run_feeds_the_forced_tokens_and_ignores_the_end(name):
    model = tiny_models.build(name)
    ids = torch.arange(5, 15)[None]
    chosen, logits = walk(model, ids, 12)
    assert len(chosen) == 12
    assert len(logits) == 13
    assert [int(step.argmax()) for step in logits[1:]] == chosen
    again, same = walk(model, ids, 12, forced=chosen)
    assert again == chosen
    assert all(same_bits(left, right) for left, right in zip(logits, same, strict=True))
    end = model.config.eos_token_id
    forced, other = walk(model, ids, 12, forced=[end] * 12)
    assert forced == [end] * 12
    assert not all(same_bits(left, right) for left, right in zip(logits, other, strict=True))


def test_altered_bytes_make_it_fail(copied):
    change_weight(copied, honest=False)
    report = verify(copied, tokens=4)
    assert not report.identical
    assert report.damaged_experts == 8
    assert "8 experts of the store do not match" in report.describe()


def test_another_function_makes_it_fail(folder, copied):
    change_weight(copied, honest=True)
    assert verify(copied, tokens=4).identical  # the store agrees with itself
    report = verify(copied, tokens=4, reference=folder / "model")
    assert not report.identical
    assert report.first_difference == 0
    assert report.max_abs_diff > 0
    assert "NOT identical" in report.describe()
    assert "differ from step 0" in report.describe()


def test_an_altered_dense_file_makes_it_fail(copied):
    path = copied / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    report = verify(copied, tokens=2)
    assert not report.identical
    assert report.damaged_files == ("model.safetensors",)
    assert "altered: model.safetensors" in report.describe()


def test_a_plain_model_is_packed_to_a_temporary_store(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    report = verify(folder / "model", tokens=4, slots=5)
    assert report.identical
    assert report.reference == str(folder / "model")
    assert report.slots == 5
    assert not list(tmp_path.iterdir())


def test_budget_and_settings_reach_the_runtime(folder):
    report = verify(folder / "store", tokens=2, budget=6 * 8192, reader="seek", threads=1)
    assert report.identical
    assert report.slots == 5  # and one more for what passes through
    with pytest.raises(SettingError, match="no setting of load"):
        verify(folder / "store", tokens=2, speed=11)


def test_a_reference_of_another_model_is_refused(folder, tmp_path):
    tiny_models.build("qwen3_moe", num_experts=16).save_pretrained(tmp_path / "other")
    with pytest.raises(ModelError, match="is another model than the one packed"):
        verify(folder / "store", reference=tmp_path / "other")


def test_a_reference_of_another_width_is_refused(folder, tmp_path):
    inflate(folder / "model", tmp_path / "wide", expert_mib=0.02)
    with pytest.raises(ModelError, match="inflated in the same way"):
        verify(folder / "store", reference=tmp_path / "wide")


def test_a_resident_model_that_does_not_fit_is_refused(folder, monkeypatch):
    monkeypatch.setattr(reference, "available_bytes", lambda: 1000)
    with pytest.raises(ModelError, match=r"needs .* GiB and 0\.00 GiB are free"):
        verify(folder / "store")


@pytest.mark.parametrize("tokens", [0, 8192])
def test_tokens_out_of_range_are_refused(folder, tokens):
    with pytest.raises(SettingError, match="tokens must be"):
        verify(folder / "store", tokens=tokens)


def test_prompts_are_checked(folder, tmp_path):
    assert 3 <= verify(folder / "store", tokens=2, prompt="abc").prompt_tokens <= 4
    tiny_models.build("qwen3_moe").save_pretrained(tmp_path / "model")
    with pytest.raises(ModelError, match="no tokenizer"):
        verify(tmp_path / "model", tokens=2, prompt="a")


def test_bits_are_compared_not_values():
    zero, nan = torch.tensor([0.0]), torch.tensor([float("nan")])
    assert same_bits(nan, nan.clone())
    assert not same_bits(zero, -zero)
    assert not same_bits(zero, torch.zeros(2))
    assert not same_bits(zero, zero.double())
    assert max_abs_diff(zero, -zero) == 0.0
    assert max_abs_diff(nan, nan) == 0.0
    assert max_abs_diff(zero, nan) == float("inf")
    assert max_abs_diff(torch.tensor([1.0, 5.0]), torch.tensor([1.5, 2.0])) == 3.0


def test_the_command_verifies(folder, copied, capsys):
    assert program.main(["verify", str(folder / "store"), "--tokens", "4", "--slots", "0.5", "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert value["identical"] is True
    assert (value["tokens"], value["max_abs_diff"], value["slots"]) == (4, 0.0, 8)
    change_weight(copied, honest=False)
    assert program.main(["verify", str(copied), "--tokens", "2"]) == 1
    assert capsys.readouterr().out.startswith("NOT identical")
    assert program.main(["verify", str(folder / "store"), "--slots", "3", "--budget", "1MiB"]) == 2
    assert program.main(["verify", str(folder)]) == 1
    assert "no config.json" in capsys.readouterr().err


# generate


def greedy(folder, prompt, tokens, factory=AutoModelForCausalLM):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = factory.from_pretrained(folder)
    if factory is AutoModelForCausalLM:
        model.set_experts_implementation("grouped_mm")
    inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    output = model.generate(**inputs, max_new_tokens=tokens, do_sample=False)
    skipped = inputs["input_ids"].shape[1] if factory is AutoModelForCausalLM else 1
    new = output[0, skipped:].tolist()
    return new, tokenizer.decode(new, skip_special_tokens=True)


def test_the_command_generates_what_the_resident_model_does(tmp_path, capsys):
    model = models.path("foregate-mini")
    pack(model, tmp_path / "store")
    new, text = greedy(model, "The film is", 12)
    arguments = ["generate", str(tmp_path / "store"), "--prompt", "The film is", "--max-new-tokens", "12"]
    capsys.readouterr()
    assert program.main([*arguments, "--slots", "0.25", "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert value["token_ids"] == new
    assert value["text"] == text
    assert value["stats"]["misses"] > 0
    assert value["stats"]["slots"] == 48
    assert program.main([*arguments, "--slots", "48"]) == 0
    out, err = capsys.readouterr()
    assert out.strip() == text.strip()
    assert "tokens/s" in err


def test_the_command_generates_with_an_encoder_decoder(tmp_path, capsys):
    model = models.path("foregate-mini-switch")
    pack(model, tmp_path / "store")
    prompt = "sst2 sentence: a moving film"
    new, text = greedy(model, prompt, 6, AutoModelForSeq2SeqLM)
    capsys.readouterr()
    assert (
        program.main(["generate", str(tmp_path / "store"), "--prompt", prompt, "--max-new-tokens", "6", "--json"]) == 0
    )
    value = json.loads(capsys.readouterr().out)
    assert (value["token_ids"], value["text"]) == (new, text)


def test_the_command_generates_with_the_part_that_does_or_refuses(tmp_path, capsys):
    for name in ("qwen3_omni_moe", "openai_privacy_filter"):
        tiny_models.build(name).save_pretrained(tmp_path / name)
        tiny_models.tokenizer().save_pretrained(tmp_path / name)
        pack(tmp_path / name, tmp_path / f"{name}-store")
        code = program.main(["generate", str(tmp_path / f"{name}-store"), "--prompt", "abc", "--max-new-tokens", "3"])
        assert code == (0 if name == "qwen3_omni_moe" else 1)
    assert "TokenClassification, which generates no text" in capsys.readouterr().err


def test_prompts_come_from_files_and_standard_input(folder, tmp_path, capsys, monkeypatch):
    (tmp_path / "prompt.txt").write_text("Hello")
    base = ["generate", str(folder / "store"), "--max-new-tokens", "3", "--json"]
    results = []
    for words in (["--prompt", "Hello"], ["--prompt-file", str(tmp_path / "prompt.txt")], ["--prompt-file", "-"]):
        monkeypatch.setattr(sys, "stdin", io.StringIO("Hello"))
        assert program.main([*base, *words]) == 0
        results.append(json.loads(capsys.readouterr().out)["token_ids"])
    assert results[0] == results[1] == results[2]


def test_sampling_follows_the_seed(folder, capsys):
    base = ["generate", str(folder / "store"), "--prompt", "a", "--max-new-tokens", "8", "--temperature", "2", "--json"]
    results = []
    for seed in ("1", "1", "2"):
        assert program.main([*base, "--seed", seed]) == 0
        results.append(json.loads(capsys.readouterr().out)["token_ids"])
    assert results[0] == results[1] != results[2]


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ([], 2, "one of --prompt"),
        (["--prompt", "a", "--prompt-file", "b"], 2, "one of --prompt"),
        (["--prompt-file", "absent.txt"], 1, "no text that can be read"),
        (["--prompt", "a", "--max-new-tokens", "0"], 2, "--max-new-tokens must be"),
        (["--prompt", "a", "--temperature", "-1"], 2, "temperature must be"),
        (["--prompt", "a", "--slots", "1.5"], 2, "slots must be"),
        (["--prompt", "a", "--budget", "lots"], 2, "no number of bytes"),
    ],
)
def test_wrong_usage_is_one_sentence(folder, words, code, said, capsys):
    assert program.main(["generate", str(folder / "store"), *words]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert said in err


def test_generating_from_a_plain_model_says_to_pack_it(folder, capsys):
    assert program.main(["generate", str(folder / "model"), "--prompt", "a"]) == 1
    assert "foregate pack" in capsys.readouterr().err
