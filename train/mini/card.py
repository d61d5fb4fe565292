"""Model cards of the mini models. Measures the folder that was written, loaded as a user would load it."""

from __future__ import annotations

import json
import platform
from dataclasses import asdict
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer

from . import causal, switch
from .load import accuracy_summary, load_summary
from .loop import Loop
from .page import page
from .recipe import Recipe
from .tasks import Tasks
from .text import Text

TITLES = {"causal": "Qwen3-MoE language model", "switch": "Switch Transformers text-to-label model"}
CLASSES = {"causal": AutoModelForCausalLM, "switch": AutoModelForSeq2SeqLM}


def write_card(recipe: Recipe, loop: Loop, train: Text, held_out: Text) -> None:
    """Write card.json and README.md beside the weights."""
    folder = recipe.output
    model = CLASSES[recipe.kind].from_pretrained(folder, dtype=torch.bfloat16).eval()
    card = {
        "name": folder.name,
        "title": TITLES[recipe.kind],
        "model_type": model.config.model_type,
        "parameters": model.num_parameters(),
        "dtype": "bfloat16",
        "held_out": measure_folder(folder, held_out, recipe),
        "before_training": loop.curve[0],
        "curve": loop.curve,
        "data": {"train": train.counts(), "held_out": held_out.counts()},
        "training": {
            "seed": recipe.seed,
            "threads": recipe.threads,
            "minutes": round(loop.minutes, 1),
            "steps": loop.step,
            "tokens": loop.tokens,
            "tokens_per_s": round(loop.tokens / max(1e-9, 60 * loop.minutes)),
            "schedule": asdict(recipe.schedule),
        },
        "shape": asdict(recipe.shape),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "tokenizers": tokenizers.__version__,
        },
    }
    (folder / "card.json").write_text(json.dumps(card, indent=2) + "\n", encoding="utf-8")
    (folder / "README.md").write_text(page(card), encoding="utf-8")


def measure_folder(folder: Path, held_out: Text, recipe: Recipe) -> dict[str, Any]:
    """Measure a written model on held-out text with the weights as they are stored."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = CLASSES[recipe.kind].from_pretrained(folder, dtype=torch.bfloat16).eval()
    if recipe.kind == "causal":
        rows_NS = causal.pack(tokenizer, held_out, recipe.schedule.sequence_tokens, recipe.seed)
        perplexity, counts_LE = causal.measure(model, rows_NS)
        return {
            "perplexity": round(perplexity, 2),
            "tokens": rows_NS.numel(),
            "load": load_summary(counts_LE, ["causal"] * len(counts_LE)),
        }
    tasks = Tasks(tokenizer, held_out, max_tokens=recipe.schedule.sequence_tokens, seed=recipe.seed)
    report = switch.measure(model, tasks)
    each = len(report["counts_LE"]) // 2
    rows = load_summary(report["counts_LE"], ["encoder"] * each + ["decoder"] * each)
    for row, share in zip(rows, report["drop_share_L"], strict=True):
        row["drop_share"] = round(float(share), 5)
    accuracy = {}
    for task, labels in (("sst2", tasks.sst2_labels), ("mrpc", tasks.mrpc_labels)):
        majority = max(labels.count(0), labels.count(1))
        accuracy[task] = accuracy_summary(report["correct"][task], len(labels), majority)
    return {"accuracy": accuracy, "span_perplexity": round(report["span_perplexity"], 2), "load": rows}
