"""Tables of an assessment, from its plain values: rows of words for the page and lines for a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ...collect.notes import Note, note_lines
from .names import name_of, rate_of

Row = dict[str, str]


class Way(NamedTuple):
    """One way to serve the events."""

    words: str
    real: bool
    """Whether it needs no foresight and fewer slots than experts."""


WAYS = {
    "lru": Way("LRU, on demand", True),
    "lru_prefetched_within_forward": Way("LRU, each token's misses foretold at its start", False),
    "lru_prefetched": Way("LRU, all misses foretold", False),
    "free": Way("best free policy, on demand", True),
    "free_signal": Way("best free policy and free signal", True),
    "belady": Way("Belady, on demand", False),
    "limit": Way("Belady, all misses foretold (limit)", False),
    "resident": Way("all experts resident", False),
}


def share(value: float | None, digits: int = 1) -> str:
    """Format a share as a percentage, '-' where it is unknown."""
    return "-" if value is None else f"{100 * value:.{digits}f} %"


def span(interval: Sequence[float] | None) -> str:
    """Format an interval of shares."""
    return "-" if interval is None else f"{100 * interval[0]:.1f} to {100 * interval[1]:.1f} %"


def number(value: float | None, digits: int = 2) -> str:
    """Format a number."""
    return "-" if value is None else f"{value:.{digits}f}"


def gain_rows(values: Mapping[str, Any]) -> list[Row]:
    """Give what each way can gain at most, over LRU on demand."""
    gains = values["gains"]
    reads = gains["misses_per_token"]
    rows = []
    for name, key, words in (
        ("prefetch", "lru_prefetched", "prefetching: LRU's misses, all foretold"),
        ("cache", "belady", "a better cache: Belady's misses, on demand"),
        ("both", "limit", "both: the limit"),
    ):
        row = {
            "at most": words,
            "gain": f"{gains[name]:.2f} x",
            "any machine": f"{gains['on_any_machine'][name]:.2f} x",
        }
        row["reads/token"] = number(reads["lru" if name == "prefetch" else "belady"])
        if gains["tokens_per_s"] is not None:
            row["tokens/s"] = rate_of(gains["tokens_per_s"][key])
        rows.append(row)
    return rows


def rate_rows(values: Mapping[str, Any]) -> list[Row]:
    """Give tokens per second of each way; none without a machine."""
    rates = values["gains"]["tokens_per_s"] or {}
    return [
        {"way": way.words, "tokens/s": rate_of(rates[name]), "over LRU": f"{rates[name] / rates['lru']:.2f} x"}
        for name, way in WAYS.items()
        if name in rates
    ]


def curve_rows(values: Mapping[str, Any], key: str = "miss_rate") -> list[Row]:
    """Give a row per policy and a column per capacity: miss rates, or tokens_per_s where a machine is known."""
    curves = values["curves"]
    rows = []
    for name, policy in curves["policies"].items():
        if policy[key] is None:
            return []
        row = {"policy": name_of(name)}
        for capacity, part, value in zip(curves["capacities"], curves["shares"], policy[key], strict=True):
            column = f"{capacity} ({100 * part:.0f}%)"
            row[column] = share(value) if key == "miss_rate" else rate_of(value)
        if key == "miss_rate":
            row["recovered"] = number(policy["recovered_share"])
        rows.append(row)
    return rows


def signal_rows(signals: Mapping[str, Any]) -> list[Row]:
    """Give recall and coverage of every free signal of one stack."""
    rows = []
    for name, signal in signals["signals"].items():
        row = {"signal": name_of(name), "recall": share(signal["recall"]), "95 %": span(signal["interval"])}
        for point, asked in zip(signal["coverage"], signals["fetched_per_miss"], strict=False):
            row[f"covers at {asked:g}/miss"] = share(point["covered_misses"])
        rows.append(row)
    return rows


def overlap_rows(values: Mapping[str, Any]) -> list[Row]:
    """Give the overlap by window."""
    return [
        {
            "tokens before": str(window["window"]),
            "overlap": share(window["overlap"]),
            "95 %": span(window["interval"]),
            "popularity": share(window["popularity"]),
            "chance": share(window["chance"]),
        }
        for window in values["overlap"]
    ]


def hot_set_rows(values: Mapping[str, Any]) -> list[Row]:
    """Give the hot set's coverage by size."""
    return [
        {
            "hottest": f"{100 * item['share']:g} % ({item['experts']})",
            "on other sequences": share(item["held_out"]),
            "in sample": share(item["in_sample"]),
        }
        for item in values["coverage"]
    ]


def load_rows(load: Mapping[str, Any]) -> list[Row]:
    """Give every layer's balance."""
    return [
        {
            "MoE layer": f"{layer['layer']} ({layer['stack']})",
            "experts": str(layer["experts"]),
            "entropy": number(layer["entropy"], 3),
            "effective": number(layer["effective_experts"], 1),
            "largest/mean": number(layer["max_over_mean"]),
            "Gini": number(layer["gini"], 3),
            "never used": share(layer["never_used"]),
        }
        for layer in load["layers"]
    ]


def repetition_rows(values: Mapping[str, Any]) -> list[Row]:
    """Give what is repeated, by stack."""
    return [
        {
            "stack": stack,
            "found by": found["by"].replace("_", " "),
            "template": share(found["template"]),
            "repeated runs": share(found["repeated"]),
            "same group again": share(found["again"]),
            "duplicates": share(found["duplicate"]),
            "any of these": share(found["any"]),
        }
        for stack, found in values["contamination"]["stacks"].items()
    ]


def without_rows(values: Mapping[str, Any]) -> list[Row]:
    """Give miss rate and overlap with and without what is repeated."""
    found = values["contamination"]
    return [
        {
            "replayed": words,
            "LRU miss rate": share(found[key]["lru_miss_rate"]),
            "overlap": share(found[key]["overlap"]),
        }
        for key, words in (("with", "as recorded"), ("without", "without repeated tokens"))
        if found[key] is not None
    ]


def lines_of(values: Mapping[str, Any]) -> list[str]:
    """Give what a terminal shows: the verdict first, then the tables that it rests on."""
    counted, replayed = values["counted"], values["replayed"]
    done = "nothing replayed"
    if replayed is not None:
        done = f"{replayed['sequences']} replayed ({replayed['tokens']} tokens) as {values['as']}"
    lines = [
        values["verdict"]["sentence"],
        "",
        f"{values['trace']}: {values['model'] or 'unnamed model'}, {values['topology']}; "
        f"{counted['sequences']} of {counted['of_sequences']} sequences counted ({counted['tokens']} tokens), {done}",
        *note_lines(Note(**note) for note in values["notes"]),
    ]
    tables = []
    if values["gains"] is not None:
        tables += [("gains over LRU on demand, at most", gain_rows(values)), ("tokens/s", rate_rows(values))]
        tables += [("miss rates by experts in slots", curve_rows(values))]
    tables.append(("overlap", overlap_rows(values)))
    tables += [(f"free signals, {stack}", signal_rows(found)) for stack, found in values["signals"].items()]
    tables += [("repetition, share of tokens", repetition_rows(values)), ("", without_rows(values))]
    for title, rows in tables:
        if rows:
            lines += ["", *([title] if title else []), *aligned(rows)]
    reasons = [] if values["overlap"] else [f"no overlap: {values['limits']['tokens']}"]
    for stack, found in values["signals"].items():
        reasons += [f"no free signals, {stack}: {found['reason']}"] if found["reason"] else []
        reasons += [f"left out: {', '.join(map(name_of, found['left_out']))}"] if found["left_out"] else []
    lines += ["", *reasons] if reasons else []
    mean = values["load"]["mean"]
    lines += [
        "",
        f"load: entropy {number(mean['entropy'], 3)} of uniform, largest/mean {number(mean['max_over_mean'])}, "
        f"never used {share(values['load']['never_used'])}; {share(values['load']['dropped'])} of choices dropped",
    ]
    return lines


def aligned(rows: Sequence[Row]) -> list[str]:
    """Align rows into columns, the first to the left."""
    names = list(rows[0])
    widths = [max(len(name), *(len(row.get(name, "")) for row in rows)) for name in names]
    table = [names, *([row.get(name, "") for name in names] for row in rows)]
    return [
        "  "
        + "  ".join(
            cell.rjust(width) if index else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in table
    ]
