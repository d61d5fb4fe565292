"""The page of an evaluation, from its plain values. Knows figures and tables; computes nothing."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Any

from ..collect.wording import counted
from ..runtime.report import Section, settings_section, write_sections
from . import evaluation_figures as figures
from . import evaluation_table as tables

MOST_NOTES = 3  # of an import, those that cast doubt on figures; the values have all


def write_evaluation(path: Path, values: dict[str, Any]) -> None:
    """Write the HTML report of what `foregate evaluate` found; the values are inside, as JSON with the id "data"."""
    write_sections(
        path,
        title=f"What a predictor is worth: {values['family']}",
        lead=values["verdict"],
        summary=summary(values),
        sections=[
            *(_horizon(name, report) for name, report in values["horizons"].items()),
            settings_section(
                {
                    "bundle": values["bundle"],
                    "trace": values["trace"],
                    "foregate": importlib.metadata.version("foregate"),
                }
            ),
        ],
        data=values,
    )


def summary(values: dict[str, Any]) -> list[str]:
    """Say what was measured, in which domain, how quick it is and what share of misses it recovers."""
    unseen, tokens = counted(values["sequences"], "unseen sequence"), counted(values["tokens"], "token")
    left_out = counted(values["left_out"], "sequence was", "sequences were")
    latency = values["latency_ms"]
    lines = [
        f"{values['trace']}: {unseen}, {tokens} ({left_out} in its training); {values['domain']}-domain: "
        f"{values['domain_reason']}.",
        f"Free signals are fitted on {values['baselines_fitted_on']}.",
        f"One prediction takes {latency['p50']:.3g} ms on one core here (p99 {latency['p99']:.3g} ms).",
    ]
    if values["recovered_share"] is not None:
        lines.append(
            "With 25 % of the experts in the cache, eviction by its forecasts goes "
            f"{100 * values['recovered_share']:.1f} % of the way from LRU's misses to the fewest possible."
        )
    doubts = [note["sentence"] for note in values["notes"] if note["kind"] != "remark"]
    lines += [f"Note of the import, which these figures do not heed: {sentence}" for sentence in doubts[:MOST_NOTES]]
    return lines


def _horizon(name: str, report: dict[str, Any]) -> Section:
    capacity, misses = report["on_misses"]["capacity"], report["on_misses"]["misses"]
    told = [
        (
            "Share of the true experts that are named: top-k per layer, with its interval over sequences, and twice as "
            "many; share of what is named that is used; recall where half of a token's bytes may be fetched; share of "
            "tokens all of whose experts are named; share of what LRU misses that is named. In %.",
            tables.signal_rows(report),
        ),
        ("Recall in % when so many experts per token may be fetched, best scores first.", tables.budget_rows(report)),
        ("Recall and precision in % by the number named per layer (k: its own top-k).", tables.number_rows(report)),
    ]
    if report.get("by_category"):
        told.append(("Recall in % by category.", tables.category_rows(report)))
    temperature = report["calibration"]["temperature"]
    return Section(
        title=f"Horizon: {name}",
        lines=[
            report["verdict"],
            f"LRU with {counted(capacity, 'slot')} missed {counted(misses, 'expert')} of the tokens counted. Each "
            "sequence's first token is left out everywhere.",
        ],
        figures=[
            ("Recall of every MoE layer when naming top-k.", figures.layer_figure(report)),
            ("Recall by the number of experts named per layer.", figures.curve_figure(report)),
            ("Recall by the place in the sequence, naming top-k.", figures.position_figure(report)),
            (
                f"What came true of what was predicted; the temperature is {temperature:.3g}.",
                figures.reliability_figure(report),
            ),
        ],
        tables=told,
    )
