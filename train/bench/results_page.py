"""The page of results as Markdown, from stored cells alone. Knows their JSON; nothing of training."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

HORIZONS = {
    "token": "Token horizon: all MoE layers of a token, from tokens up to it and the routing before it",
    "layer": "Layer horizon: one layer ahead, also from the true experts of the token's earlier layers",
    "batch": "Batch horizon: all tokens known, before the batch starts",
}
INTRODUCTION = """# What predictors are worth

Written by `foregate bench predictors --page docs/results.md` from stored cells; every figure is of sequences that the
predictor has not seen (20 % of them, whole conversations where there are any), with the bootstrap interval over
sequences at 95 %. Recall is the share of a token's true experts among as many named, all layers averaged, each
sequence's first token left out; at the layer horizon the first MoE layer is left out too, since nothing stands before
it. `recovered` is the share of the gap between LRU and Belady that eviction by the reuse head closes at 25 % of the
experts, decode events, cold cache. Latency is of one step on one thread of onnxruntime. Free signals are fitted on the
sequences that trained. Where a trace is tested on another one, all of that one's sequences count. Where whole
categories are held out, the text is of a kind that no predictor was trained on. What was tried for the figures, and
what is behind them: [attempts.md](attempts.md).
"""


def results_page(results: Iterable[dict[str, Any]]) -> str:
    """Write the page: per trace and horizon one table of families, longest training first, and the free signals."""
    ordered = sorted(results, key=lambda result: (_title(result["cell"]), result["cell"]["config"]))
    parts = [INTRODUCTION]
    for title in dict.fromkeys(_title(result["cell"]) for result in ordered):
        own = [result for result in ordered if _title(result["cell"]) == title]
        parts.append(f"## {title}\n")
        parts.append(f"Trace `{own[0]['cell']['trace']}`.\n")
        for horizon, meaning in HORIZONS.items():
            here = [result for result in own if horizon in result["evaluation"]["horizons"]]
            if here:
                parts.append(f"### {meaning}\n\n{_table(here, horizon)}")
    machines = sorted({_machine(result["machine"]) for result in ordered})
    parts.append("## Machine\n\n" + "\n".join(f"- {name}" for name in machines) + "\n")
    return "\n".join(parts)


def _title(cell: dict[str, Any]) -> str:
    split = cell.get("split_by", "group")
    tested = f", tested on {cell['tested']}" if cell.get("tested") else ""
    return cell["label"] + tested + ("" if split == "group" else f", held out by {split}")


def _table(results: list[dict[str, Any]], horizon: str) -> str:
    head = ("predictor", "minutes", "seed", "recall", "interval", "over the best free", "recovered", "ms p50 / p99")
    if horizon == "batch":
        head = (*head[:5], "in the top 3", *head[5:])
    rows = []
    for result in sorted(results, key=lambda item: -item["evaluation"]["horizons"][horizon]["recall_at_k"]):
        cell, evaluation = result["cell"], result["evaluation"]
        told = evaluation["horizons"][horizon]
        share = evaluation["recovered_share"] if horizon == "token" else None
        top = [f"**{told['recall_at']['3']:.4f}**"] if horizon == "batch" else []
        low, high = told["gain_interval"] or (0.0, 0.0)
        rows.append(
            (
                cell["config"],
                f"{cell['minutes']:g}",
                str(cell["seed"]),
                f"**{told['recall_at_k']:.3f}**",
                _interval(told["interval"]),
                *top,
                f"{told['gain']:+.3f} ({low:+.3f} to {high:+.3f})" if told["gain"] is not None else "-",
                "-" if share is None else f"**{share:.3f}**",
                f"{evaluation['latency_ms']['p50']:.2f} / {evaluation['latency_ms']['p99']:.2f}",
            )
        )
    told = results[0]["evaluation"]["horizons"][horizon]
    for name, figures in sorted(told["free"].items(), key=lambda item: -item[1]["recall_at_k"]):
        top = [f"{figures['recall_at']['3']:.4f}"] if horizon == "batch" else []
        share = (f"{figures['recall_at_k']:.3f}", _interval(figures["interval"]), *top)
        rows.append((f"{name} (free)", "-", "-", *share, "-", "-", "-"))
    lines = [" | ".join(row) for row in (head, ["---"] * len(head), *rows)]
    return "\n".join(f"| {line} |" for line in lines) + "\n"


def _interval(pair: list[float]) -> str:
    return f"{pair[0]:.3f} to {pair[1]:.3f}"


def _machine(machine: dict[str, Any]) -> str:
    return (
        f"{machine['cpu']}, {machine['usable_cores']} cores, {machine['memory_gib']} GiB; Python {machine['python']}, "
        f"torch {machine['torch']}; accelerator: {machine['accelerator'] or 'none'}"
    )
