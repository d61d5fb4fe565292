"""Rows of an evaluation as text in percent, for a terminal and for the page. Knows plain values; computes nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..runtime.assessment.names import name_of
from .evaluation_figures import OWN, lines_of

BEST = "best free"  # beside the name of the signal to beat


def signal_rows(report: dict[str, Any]) -> list[dict[str, str]]:
    """Give one row for the predictor and each signal that it is measured beside."""
    rows = []
    for name, values in lines_of(report, ceiling=True).items():
        rows.append(
            {
                "": _name(name, report),
                "recall": percent(values["recall_at_k"]),
                "interval": _ends(values["interval"]),
                "at 2k": percent(values["recall_at"]["2k"]),
                "precision": percent(values["precision_at"]["1k"]),
                "half bytes": percent(values["budget"]["50%"]),
                "path": percent(values["whole_path"]["1k"], 2),
                "path 2k": percent(values["whole_path"]["2k"], 2),
                "LRU misses": percent(values["on_misses"]["recall_at_k"]),
            }
        )
    return rows


def budget_rows(report: dict[str, Any]) -> list[dict[str, str]]:
    """Give recall by the bytes that may be fetched per token."""
    return [
        {"": _name(name, report)} | {f"{share} of L x k": percent(value) for share, value in values["budget"].items()}
        for name, values in lines_of(report, ceiling=True).items()
    ]


def number_rows(report: dict[str, Any]) -> list[dict[str, str]]:
    """Give recall and precision by the number named per layer, of the predictor and the best free signal."""
    best = report["free"].get(report["best_free"], {})
    rows = []
    for number, recall in report["recall_at"].items():
        row = {"named": number, "recall": percent(recall), "precision": percent(report["precision_at"][number])}
        if best:
            row[f"recall, {name_of(report['best_free'])}"] = percent(best["recall_at"][number])
        rows.append(row)
    return rows


def category_rows(report: dict[str, Any]) -> list[dict[str, str]]:
    """Give recall by category, beside the best free signal."""
    rows = []
    for entry in report.get("by_category", ()):
        row = {
            "category": entry["category"] or "-",
            "sequences": str(entry["sequences"]),
            "tokens": str(entry["tokens"]),
            "recall": percent(entry["recall_at_k"]),
            "interval": _ends(entry["interval"]),
        }
        if report["best_free"] is not None:
            row[name_of(report["best_free"])] = percent(entry["baselines"][report["best_free"]])
        if "in_training" in entry:
            row["in training"] = "yes" if entry["in_training"] else "no"
        rows.append(row)
    return rows


def percent(value: float | None, digits: int = 1) -> str:
    """Format a share in percent; a dash where there is none."""
    return "-" if value is None else f"{100 * value:.{digits}f}"


def _ends(interval: list[float]) -> str:
    low, high = interval
    return f"{100 * low:.1f} to {100 * high:.1f}"


def _name(name: str, report: Mapping[str, Any]) -> str:
    if name == OWN:
        return f"{OWN}{'' if report['beats_free'] else ' (beats nothing free)'}"
    return f"{name_of(name)} ({BEST})" if name == report["best_free"] else name_of(name)
