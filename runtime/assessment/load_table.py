"""What a load table can tell: how evenly experts are used, overall and batch by batch. Knows counts, no tokens.

Counts without tokens say nothing of misses, overlap or predictability: there is no verdict on prefetching or caching.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ...collect.errors import TraceError
from ...collect.load_table import LoadTable, check_row
from ..report import Section, heat_map, write_sections
from .figures import balance_figure, load_array
from .load import balance
from .tables import aligned, load_rows, number, share

SENTENCE = (
    "This is a load table: counts without tokens. It shows how evenly the experts are used; what prefetching or a "
    "cache can gain, and whether training is worth it, needs a routing trace."
)


def assess_load(table: LoadTable) -> dict[str, Any]:
    """Describe the balance of every run of a load table.

    Returns:
        {"load_table", "model", "verdict": {"kind": "load_only", "training": None, "sentence"}, "runs": {RUN: {"counts"
        [L][E], "layers": one `balance` each, with "batches" and "batch_max_over_mean" (mean over batches of the largest
        over the mean count), "mean" over the layers, "never_used" of all experts}}}

    Raises:
        TraceError: if a row does not fit the header.
    """
    held = {
        run: [np.zeros(layer.num_experts, np.int64) for layer in layers] for run, layers in table.header.runs.items()
    }
    peaks: dict[str, list[list[float]]] = {run: [[] for _ in layers] for run, layers in table.header.runs.items()}
    for index, row in enumerate(table):
        reason = check_row(table.header, row)
        if reason is not None:
            raise TraceError(f"{table.path}, row {index}: {reason}; import it again.")
        held[row.run][row.layer] += row.counts
        if row.counts.any():
            peaks[row.run][row.layer].append(float(row.counts.max() / row.counts.mean()))
    runs = {}
    for run, layers in table.header.runs.items():
        described: list[dict[str, Any]] = []
        for index, layer in enumerate(layers):
            batches = peaks[run][index]
            described.append(
                {
                    "layer": index,
                    "stack": layer.stack,
                    "experts": layer.num_experts,
                    **balance(held[run][index]),
                    "batches": len(batches),
                    "batch_max_over_mean": float(np.mean(batches)) if batches else None,
                }
            )
        runs[run] = {"counts": [counts.tolist() for counts in held[run]], "layers": described, **_overall(described)}
    verdict = {"kind": "load_only", "training": None, "sentence": SENTENCE}
    return {"load_table": str(table.path), "model": table.header.model, "verdict": verdict, "runs": runs}


def write_load(path: Path, values: dict[str, Any]) -> None:
    """Write the page of a load table."""
    sections = [
        Section(
            title=f"Expert load: {run}",
            lines=[_line(found)],
            figures=[
                ("Share of each MoE layer's choices that every expert got.", heat_map(load_array(found))),
                ("Entropy of the load over that of uniform load, and largest over mean load.", balance_figure(found)),
            ],
            tables=[("Balance of every MoE layer.", _rows(found))],
        )
        for run, found in values["runs"].items()
    ]
    title = f"Expert load: {values['model'] or 'a recorded model'}"
    write_sections(path, title=title, lead=SENTENCE, summary=[], sections=sections, data=values)


def load_lines(values: dict[str, Any]) -> list[str]:
    """Give what a terminal shows."""
    lines = [SENTENCE]
    for run, found in values["runs"].items():
        lines += ["", f"{run}: {_line(found)}", *aligned(_rows(found))]
    return lines


def _overall(layers: list[dict[str, Any]]) -> dict[str, Any]:
    mean = {}
    for name in ("entropy", "effective_experts", "max_over_mean", "gini", "batch_max_over_mean"):
        known = [layer[name] for layer in layers if layer[name] is not None]
        mean[name] = float(np.mean(known)) if known else None
    unused = sum(layer["never_used"] * layer["experts"] for layer in layers)
    return {"mean": mean, "never_used": unused / sum(layer["experts"] for layer in layers)}


def _line(found: dict[str, Any]) -> str:
    mean = found["mean"]
    return (
        f"Mean over layers: entropy {number(mean['entropy'], 3)} of uniform, largest over mean load "
        f"{number(mean['max_over_mean'])}, {number(mean['batch_max_over_mean'])} in a batch; "
        f"{share(found['never_used'])} of the experts were never used."
    )


def _rows(found: dict[str, Any]) -> list[dict[str, str]]:
    rows = load_rows(found)
    for row, layer in zip(rows, found["layers"], strict=True):
        row["in a batch"] = number(layer["batch_max_over_mean"])
    return rows
