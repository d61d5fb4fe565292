"""The README of a mini model, made from its card alone. Knows Markdown; measures nothing."""

from __future__ import annotations

from typing import Any

USE = {
    "causal": """from transformers import AutoModelForCausalLM, AutoTokenizer
from foregate.runtime.models import path

folder = path("{name}")
tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
tokens = model.generate(**tokenizer("The film is", return_tensors="pt"), max_new_tokens=20)
print(tokenizer.decode(tokens[0], skip_special_tokens=True))""",
    "switch": """from transformers import AutoModelForSeq2SeqLM, AutoTokenizer
from foregate.runtime.models import path

folder = path("{name}")
tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForSeq2SeqLM.from_pretrained(folder)
batch = tokenizer("sst2 sentence: a fine film", return_tensors="pt")
print(tokenizer.decode(model.generate(**batch, max_new_tokens=16)[0], skip_special_tokens=True))""",
}
SOURCES = (
    "SST-2, MRPC and RTE (GLUE), nine tenths of the articles of the WikiText-2 validation file (CC BY-SA), the seed"
    " tasks of Self-Instruct (Apache 2.0). Held out: the dev sets and the other"
    " articles; training lines that stand verbatim among them are left out. The `pydoc_data.topics` of Python were"
    " never read."
)


def page(card: dict[str, Any]) -> str:
    """Return the README text of a card."""
    kind = "causal" if "perplexity" in card["held_out"] else "switch"
    training, shape = card["training"], card["shape"]
    width = 3 if kind == "causal" else 2
    expert_bytes = width * shape["hidden_size"] * shape["expert_size"] * 2
    parts = [
        f"# {card['name']}",
        f"{card['title']} with {card['parameters'] / 1e6:.1f} M parameters in bfloat16:"
        f" {len(card['held_out']['load'])} MoE layers of {shape['num_experts']} experts, top-{shape['top_k']},"
        f" {expert_bytes:,} bytes per expert. Made for demonstrations and tests of expert caching; it knows little.",
        f"```python\n{USE[kind].format(name=card['name'])}\n```",
        "## Held-out figures",
        _figures(card, kind),
        "Load of the experts over the held-out tokens, padding excluded. Entropy share: entropy of the load over log E,"
        " 1 when even. Peak: busiest expert over the mean.",
        _load(card["held_out"]["load"]),
        "## Training",
        f"{training['steps']:,} steps, {training['tokens']:,} tokens, {training['minutes']} minutes on"
        f" {training['threads']} CPU thread(s) ({training['tokens_per_s']:,} tokens/s), seed {training['seed']}; torch"
        f" {card['versions']['torch']}, transformers {card['versions']['transformers']}. Again:",
        f"```sh\nFOREGATE_DATA=folder python -m foregate.train.mini --config configs/mini/{kind}.yaml\n```",
        f"Text: {SOURCES}",
        _table(
            ["source", "training", "held out"],
            [
                [name, f"{count:,}", f"{card['data']['held_out'].get(name, 0):,}"]
                for name, count in card["data"]["train"].items()
            ],
        ),
        "Held-out curve, on a part of the text in training precision:" if kind == "causal" else "Held-out curve:",
        _table(list(card["curve"][0]), [[str(value) for value in point.values()] for point in card["curve"]]),
    ]
    return "\n\n".join(parts) + "\n"


def _figures(card: dict[str, Any], kind: str) -> str:
    held_out = card["held_out"]
    if kind == "causal":
        return (
            f"Perplexity {held_out['perplexity']} over {held_out['tokens']:,} tokens;"
            f" {card['before_training']['perplexity']} before training, on"
            " the part that the curve uses."
        )
    rows = [
        [
            task,
            f"{row['accuracy']:.3f}",
            f"{row['interval_95'][0]:.3f} to {row['interval_95'][1]:.3f}",
            f"{row['majority_class']:.3f}",
            str(row["examples"]),
            "at chance" if row["at_chance"] else "above chance",
        ]
        for task, row in held_out["accuracy"].items()
    ]
    table = _table(["dev set", "accuracy", "95 % interval", "majority class", "examples", "verdict"], rows)
    at_chance = [task for task, row in held_out["accuracy"].items() if row["at_chance"]]
    if at_chance:
        table += f"\n\nAt chance: {', '.join(at_chance)}. Its figures are no measure of this model; use the others."
    return f"{table}\n\nPerplexity of masked spans {held_out['span_perplexity']};" + (
        f" {card['before_training']['span_perplexity']} before training."
    )


def _load(rows: list[dict[str, Any]]) -> str:
    return _table(list(rows[0]), [[str(value) for value in row.values()] for row in rows])


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
