"""The mini recipe at smoke size, and the models that ship: their size, their cards, and a part measured again."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from foregate.collect.errors import DataError, SettingError
from foregate.runtime.models import names, path
from foregate.train.mini import causal, switch
from foregate.train.mini.__main__ import main
from foregate.train.mini.grouped import group_experts
from foregate.train.mini.load import accuracy_summary, load_summary
from foregate.train.mini.loop import Loop, pace
from foregate.train.mini.page import page
from foregate.train.mini.recipe import Recipe, Schedule, Shape, read_recipe
from foregate.train.mini.run import FEEDS, learn_tokenizer
from foregate.train.mini.tasks import Tasks
from foregate.train.mini.text import longest_phrases, read_text
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer

CONFIGS = {"causal": "configs/mini/causal.yaml", "switch": "configs/mini/switch.yaml"}
NAMES = {"causal": "foregate-mini", "switch": "foregate-mini-switch"}
LIMITS = {"foregate-mini": 20_000_000, "foregate-mini-switch": 12_000_000}
ROOT = Path(__file__).parents[2]
WORDS = ["the", "a", "river", "stone", "film", "light", "warm", "cold", "runs", "falls", "sings", "over", "near", "old"]


def write_text(folder: Path) -> Path:
    """Write made-up corpora in the layout of the local data."""
    rng = np.random.default_rng(0)

    def line(size: int = 12) -> str:
        return " ".join(rng.choice(WORDS, size))

    for split in ("train", "dev"):
        tables = {
            "sst2": ["sentence\tlabel", *(f"{line()}\t{n % 2}" for n in range(30))],
            "mrpc": ["\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String"]
            + [f'{n % 2}\t{n}\t{n}\t"{line()}\t{line()}' for n in range(12)],
            "rte": ["index\tsentence1\tsentence2\tlabel"] + [f"{n}\t{line()}\t{line()}\tentailment" for n in range(12)],
        }
        for name, rows in tables.items():
            (folder / name).mkdir(parents=True, exist_ok=True)
            (folder / name / f"{split}.tsv").write_text("\n".join(rows) + "\n", encoding="utf-8")
    (folder / "wikitext-2").mkdir()
    articles = "".join(f" \n = Title {n} = \n \n {line(40)} \n" for n in range(10))
    (folder / "wikitext-2" / "wiki.valid.tokens").write_text(articles, encoding="utf-8")
    (folder / "prompts").mkdir()
    task = {"instruction": line(), "instances": [{"input": "", "output": line()}]}
    (folder / "prompts" / "seed_tasks.jsonl").write_text(json.dumps(task) + "\n", encoding="utf-8")
    return folder


def smoke(kind: str, folder: Path, **changes: object) -> Recipe:
    """Return a recipe that trains in a second."""
    shape = Shape(
        vocab_size=300,
        hidden_size=16,
        expert_size=8,
        num_layers=2,
        num_experts=4,
        top_k=2 if kind == "causal" else 1,
        num_heads=2,
        num_kv_heads=1,
        max_length=128,
    )
    schedule = Schedule(
        optimizer="adamw" if kind == "causal" else "adafactor",
        num_steps=4,
        batch_size=4,
        sequence_tokens=64,
        warmup_steps=1,
        evaluate_steps=2,
        checkpoint_steps=2,
    )
    recipe = Recipe(
        kind=kind,  # pyright: ignore[reportArgumentType]
        output=folder / NAMES[kind],
        checkpoints=folder / "checkpoints",
        data=folder / "data",
        max_minutes=1e6,
        shape=shape,
        schedule=schedule,
    )
    return dataclasses.replace(recipe, **changes)


def loop_of(recipe: Recipe) -> Loop:
    """Return the loop of a recipe, before its first step."""
    assert recipe.data is not None
    train, held_out = read_text(recipe.data)
    torch.manual_seed(recipe.seed)
    feed = FEEDS[recipe.kind](recipe, learn_tokenizer(recipe, train), train, held_out)
    return Loop(recipe, feed.model, feed.loss, feed.measure)


def command(recipe: Recipe, kind: str) -> list[str]:
    """Return the command line of a smoke run on top of the shipped YAML."""
    args = [f"--config={ROOT / CONFIGS[kind]}", f"--threads={torch.get_num_threads()}"]
    args += [f"--{name}={getattr(recipe, name)}" for name in ("output", "checkpoints", "data", "max_minutes")]
    args += [f"--shape.{name}={value}" for name, value in dataclasses.asdict(recipe.shape).items()]
    return args + [f"--schedule.{name}={value}" for name, value in dataclasses.asdict(recipe.schedule).items()]


@pytest.mark.parametrize("kind", sorted(CONFIGS))
def test_recipe_writes_a_model_that_loads(kind: str, tmp_path: Path):
    write_text(tmp_path / "data")
    recipe = smoke(kind, tmp_path)
    assert main(command(recipe, kind)) == 0
    assert logging.getLogger("foregate").handlers == []
    tokenizer = AutoTokenizer.from_pretrained(recipe.output)
    loader = AutoModelForCausalLM if kind == "causal" else AutoModelForSeq2SeqLM
    model = loader.from_pretrained(recipe.output)
    assert model.dtype == torch.bfloat16
    tokens = model.generate(**tokenizer("the old river", return_tensors="pt"), max_new_tokens=3, do_sample=False)
    assert tokens.shape[0] == 1
    card = json.loads((recipe.output / "card.json").read_text(encoding="utf-8"))
    assert card["training"]["steps"] == 4
    assert [point["step"] for point in card["curve"]] == [0, 2, 4]
    assert (recipe.output / "README.md").read_text(encoding="utf-8") == page(card)


@pytest.mark.parametrize("kind", sorted(CONFIGS))
def test_killed_run_resumes_to_the_same_weights(kind: str, tmp_path: Path):
    write_text(tmp_path / "data")
    whole = loop_of(smoke(kind, tmp_path, checkpoints=tmp_path / "whole"))
    whole.run()
    recipe = smoke(kind, tmp_path)
    first = loop_of(recipe)
    loss = first.loss

    def killed(step: int) -> tuple[torch.Tensor, int]:
        if step == 3:
            raise KeyboardInterrupt
        return loss(step)

    first.loss = killed
    with pytest.raises(KeyboardInterrupt):
        first.run()
    second = loop_of(recipe)
    assert second.resume()
    assert second.step == 2
    second.run()
    assert second.tokens == whole.tokens
    for name, value in whole.model.state_dict().items():
        torch.testing.assert_close(second.model.state_dict()[name], value, rtol=0, atol=1e-6, msg=name)


def test_resume_refuses_other_settings(tmp_path: Path):
    write_text(tmp_path / "data")
    recipe = smoke("causal", tmp_path)
    loop_of(recipe).save()
    with pytest.raises(SettingError, match="delete its folder"):
        loop_of(dataclasses.replace(recipe, seed=3)).resume()


def test_max_minutes_ends_the_training_with_a_low_rate(tmp_path: Path):
    write_text(tmp_path / "data")
    loop = loop_of(smoke("causal", tmp_path, max_minutes=1e-9))
    loop.run()
    assert loop.step == 1
    schedule = Schedule(num_steps=1000, warmup_steps=10)
    assert pace(schedule, 500, 10.0, 10.0) == pytest.approx(0.05)
    assert pace(schedule, 1000, 0.0, 10.0) == pytest.approx(0.05)
    assert pace(schedule, 9, 0.0, 10.0) == 1.0


def test_settings_are_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SettingError, match="top_k must be 1"):
        smoke("switch", tmp_path, shape=Shape(top_k=2))
    with pytest.raises(SettingError, match="max_minutes must be positive"):
        smoke("causal", tmp_path, max_minutes=0.0)
    monkeypatch.delenv("FOREGATE_DATA", raising=False)
    assert main([f"--config={ROOT / CONFIGS['causal']}"]) == 1
    assert "FOREGATE_DATA is not set" in capsys.readouterr().err
    assert main([f"--config={ROOT / CONFIGS['causal']}", "--threads=0"]) == 2
    args = [f"--config={ROOT / CONFIGS['switch']}", "--max-minutes", "3", "--threads=2"]
    assert (read_recipe(args).max_minutes, read_recipe(args).threads) == (3.0, 2)
    with pytest.raises(SystemExit):
        read_recipe([f"--config={ROOT / CONFIGS['causal']}", "--shape.num_expertz=4"])
    with pytest.raises(DataError, match="is missing"):
        read_text(tmp_path)


def test_held_out_text_is_not_trained_on(tmp_path: Path):
    folder = write_text(tmp_path / "data")
    dev = (folder / "sst2" / "dev.tsv").read_text(encoding="utf-8").splitlines()[1]
    with (folder / "sst2" / "train.tsv").open("a", encoding="utf-8") as lines:
        lines.write(dev + "\n")
    train, held_out = read_text(folder)
    sentence = dev.split("\t")[0]
    assert sentence in held_out.documents["sst2"]
    assert sentence not in train.documents["sst2"]
    assert sentence not in [phrase for phrase, _ in train.sst2]
    assert not set(train.documents["wikitext-2"]) & set(held_out.documents["wikitext-2"])


def test_longest_phrases_drop_parts():
    assert longest_phrases(["a fine", "a fine film", "fine film", "dull", "a fine film"]) == ["a fine film", "dull"]


def test_spans_give_the_line_back(tmp_path: Path):
    train, _ = read_text(write_text(tmp_path / "data"))
    tokenizer = learn_tokenizer(smoke("switch", tmp_path), train)
    tasks = Tasks(tokenizer, train, max_tokens=64, seed=0)
    line = tasks.lines[0]
    example = tasks.spans_example(line, np.random.default_rng(0))
    spans: dict[int, list[int]] = {}
    for token in example.target[:-1]:
        if token in tasks.sentinels:
            spans[token] = []
        else:
            spans[list(spans)[-1]].append(token)
    assert [part for token in example.source[:-1] for part in spans.get(token, [token])] == line


def test_grouped_experts_equal_the_loop(tmp_path: Path):
    recipe = smoke("switch", tmp_path, shape=dataclasses.replace(smoke("switch", tmp_path).shape, expert_capacity=2))
    train, _ = read_text(write_text(tmp_path / "data"))
    tokenizer = learn_tokenizer(recipe, train)
    model = switch.build(recipe.shape, tokenizer, dataclasses.replace(recipe.schedule, dropout=0.0, jitter=0.0))
    batch = Tasks(tokenizer, train, max_tokens=64, seed=0).batch(0, 8)
    results = []
    for _ in range(2):
        model.zero_grad()
        logits = switch.run(model, batch).logits
        logits.square().mean().backward()
        results.append((logits.detach(), {name: value.grad.clone() for name, value in model.named_parameters()}))
        group_experts(model)
    torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-5)


def test_load_and_accuracy_summaries():
    even, one = load_summary(np.array([[5, 5, 5, 5], [20, 0, 0, 0]]), ["encoder", "decoder"])
    assert (even["entropy_share"], even["peak"], even["unused_experts"]) == (1.0, 1.0, 0)
    assert (one["entropy_share"], one["peak"], one["unused_experts"]) == (0.0, 4.0, 3)
    summary = accuracy_summary(80, 100, 50)
    assert summary["interval_95"] == pytest.approx([0.7112, 0.8666], abs=1e-4)  # Wilson, by hand
    assert not summary["at_chance"]
    assert accuracy_summary(55, 100, 50)["at_chance"]


def test_path_names_the_models():
    assert names() == tuple(LIMITS)
    with pytest.raises(SettingError, match="foregate-mini-switch"):
        path("foregate-maxi")
    script = "import sys, foregate.runtime.models as m; m.path('foregate-mini'); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def read_card(name: str) -> dict:
    return json.loads((path(name) / "card.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", names())
def test_shipped_model_is_small_and_complete(name: str):
    files = {file.name: file for file in path(name).iterdir()}
    assert set(files) == {
        "README.md",
        "card.json",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert sum(file.stat().st_size for file in files.values()) <= LIMITS[name]
    for file in ("config.json", "card.json", "tokenizer_config.json", "generation_config.json"):
        text = files[file].read_text(encoding="utf-8")
        assert "_name_or_path" not in text
        assert not [word for word in text.split('"') if word.startswith("/")]
    assert files["README.md"].read_text(encoding="utf-8") == page(read_card(name))


@pytest.mark.parametrize("name", names())
def test_shipped_tokenizer_gives_text_back(name: str):
    tokenizer = AutoTokenizer.from_pretrained(path(name))
    for text in ("A fine film , isn't it ?", "naïve façade — 東京\n\tdef f(x): return x**2  # two"):
        assert tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True) == text
    assert sorted(tokenizer("text")) == ["attention_mask", "input_ids"]
    assert tokenizer.eos_token_id is not None
    assert tokenizer.pad_token_id is not None


def test_causal_card_meets_its_aims():
    card = read_card("foregate-mini")
    assert card["held_out"]["perplexity"] < card["before_training"]["perplexity"] / 20
    assert len(card["held_out"]["load"]) == 6
    for row in card["held_out"]["load"]:
        assert row["entropy_share"] >= 0.8
        assert row["unused_experts"] == 0
    last, third = card["curve"][-1]["perplexity"], card["curve"][-1 - len(card["curve"]) // 3]["perplexity"]
    assert third / last < 1.25, "the curve still fell fast at the end"


def test_switch_card_meets_its_aims():
    held_out = read_card("foregate-mini-switch")["held_out"]
    assert held_out["accuracy"]["sst2"]["accuracy"] >= 0.8
    mrpc = held_out["accuracy"]["mrpc"]
    assert mrpc["at_chance"] == (mrpc["interval_95"][0] <= mrpc["majority_class"])
    assert {row["stack"] for row in held_out["load"]} == {"encoder", "decoder"}
    for row in held_out["load"]:
        assert row["entropy_share"] >= 0.8
        assert 0 <= row["drop_share"] < 0.05
    assert any(row["drop_share"] > 0 for row in held_out["load"])


@pytest.fixture(scope="module")
def local_text():
    folder = Path(os.environ.get("FOREGATE_SHARED", ROOT.parent / "shared")) / "data"
    if not folder.is_dir():
        pytest.skip(f"no local text at {folder}: set FOREGATE_SHARED")
    return read_text(folder)[1]


def test_causal_card_measured_again(local_text):
    card = read_card("foregate-mini")
    tokenizer = AutoTokenizer.from_pretrained(path("foregate-mini"))
    model = AutoModelForCausalLM.from_pretrained(
        path("foregate-mini"), dtype=torch.float32
    ).eval()  # many times as fast on some CPUs
    length = card["training"]["schedule"]["sequence_tokens"]
    rows = causal.pack(tokenizer, local_text, length, card["training"]["seed"])
    assert rows.numel() == card["held_out"]["tokens"]
    perplexity, counts = causal.measure(model, rows[:32])
    assert perplexity == pytest.approx(card["held_out"]["perplexity"], rel=0.15)
    for row, told in zip(load_summary(counts, ["causal"] * 6), card["held_out"]["load"], strict=True):
        assert row["entropy_share"] == pytest.approx(told["entropy_share"], abs=0.03)


def test_switch_card_measured_again(local_text):
    card = read_card("foregate-mini-switch")
    tokenizer = AutoTokenizer.from_pretrained(path("foregate-mini-switch"))
    model = AutoModelForSeq2SeqLM.from_pretrained(path("foregate-mini-switch"), dtype=torch.float32).eval()
    sample = dataclasses.replace(local_text, sst2=local_text.sst2[:300], mrpc=local_text.mrpc[:60])
    tasks = Tasks(tokenizer, sample, max_tokens=card["training"]["schedule"]["sequence_tokens"], seed=0)
    report = switch.measure(model, tasks)
    told = card["held_out"]
    assert report["correct"]["sst2"] / 300 == pytest.approx(told["accuracy"]["sst2"]["accuracy"], abs=0.06)
    loads = load_summary(report["counts_LE"], [row["stack"] for row in told["load"]])
    for row, before in zip(loads, told["load"], strict=True):
        assert row["entropy_share"] == pytest.approx(before["entropy_share"], abs=0.05)


def test_switch_answers_with_a_label():
    tokenizer = AutoTokenizer.from_pretrained(path("foregate-mini-switch"))
    model = AutoModelForSeq2SeqLM.from_pretrained(path("foregate-mini-switch"))
    lines = ["sst2 sentence: a warm , funny and moving film .", "sst2 sentence: a dull , lifeless and stupid mess ."]
    batch = tokenizer(lines, return_tensors="pt", padding=True)
    answers = tokenizer.batch_decode(
        model.generate(**batch, max_new_tokens=8, do_sample=False), skip_special_tokens=True
    )
    assert [answer.split(":")[0].strip() for answer in answers] == ["positive", "negative"]
