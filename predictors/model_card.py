"""The README of a bundle on the hub, made from its card: metadata that the hub reads, figures that people read.

Knows cards; knows no hub.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

LICENSE = "apache-2.0"
TAGS = ("foregate", "mixture-of-experts", "expert-prefetch", "onnx")


def model_card(card: Mapping[str, Any], repo: str) -> str:
    """Give the README as Markdown with a YAML head.

    Args:
        card: what card.json says.
        repo: OWNER/NAME that it is for.
    """
    return "\n".join([*_head(card, repo), *_body(card, repo), ""])


def _head(card: Mapping[str, Any], repo: str) -> list[str]:
    """Give the YAML head; JSON strings are YAML strings, whatever is in them."""
    tags = [*TAGS, card["family"], f"{card['horizon']}-horizon"]
    metrics, training = card.get("metrics", {}), card.get("training", {})
    lines = ["---", "library_name: foregate", f"license: {LICENSE}", "tags:", *(f"- {json.dumps(tag)}" for tag in tags)]
    figures = {
        "recall at top-k": metrics.get("recall_at_k"),
        **{f"recall at top-k of {_words(name)}": value for name, value in metrics.get("baselines", {}).items()},
    }
    if metrics.get("recall_at_k") is None:
        return [*lines, "---"]
    lines += ["model-index:", f"- name: {json.dumps(repo)}", "  results:", "  - task:", "      type: expert-prediction"]
    lines += ["    dataset:", f"      name: {json.dumps(training.get('trace') or 'routing trace')}"]
    lines += ["      type: routing-trace", "    metrics:"]
    for name, value in figures.items():
        lines += [f"    - name: {json.dumps(name)}", "      type: recall", f"      value: {value}"]
    return [*lines, "---"]


def _body(card: Mapping[str, Any], repo: str) -> list[str]:
    metrics, training = card.get("metrics", {}), card.get("training", {})
    model = _plain(card.get("model")) or "a model whose name the trace does not tell"
    lines = [
        f"# {repo}",
        "",
        f"Predicts which experts of a mixture-of-experts model the next tokens need, for {model}; family "
        f"`{_plain(card['family'])}`, {card['horizon']} horizon. Made by foregate.",
        "",
        "```sh",
        f"foregate generate STORE --predictor hub:{repo} --prompt ...",
        f"foregate evaluate hub:{repo} TRACE",
        "```",
        "",
    ]
    if card.get("verdict"):
        lines += [_plain(card["verdict"]), ""]
    if metrics.get("baselines"):
        low, high = metrics["interval"]
        lines += ["| named top-k per layer | recall |", "|---|---|"]
        lines += [f"| this predictor | {metrics['recall_at_k']:.3f} ({low:.3f} to {high:.3f}) |"]
        free = sorted(metrics["baselines"].items(), key=lambda item: -item[1])
        lines += [f"| {_words(name)} (free) | {value:.3f} |" for name, value in free]
        unseen = f"{metrics.get('sequences')} sequences, {metrics.get('tokens')} tokens"
        lines += ["", f"Measured on {unseen} that training did not see; 95 % interval over sequences.", ""]
    latency = card.get("latency_ms")
    if latency:
        lines += [f"One prediction took {latency['p50']:.3g} ms on one core where it was exported.", ""]
    sources = ", ".join(map(_plain, training.get("sources", [])))
    if sources:
        lines += [f"Trained on routing of: {sources}.", ""]
    return lines


def _words(name: str) -> str:
    return _plain(name).replace("_", " ")


def _plain(text: Any) -> str:
    """Give text as one line without what Markdown would read: names come from traces of anybody."""
    line = " ".join(str(text or "").split())
    return "".join(f"\\{character}" if character in "\\`*[]<>|#" else character for character in line)
