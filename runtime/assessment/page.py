"""The page that a person reads, from an assessment's plain values. Knows figures and tables; computes nothing."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...collect.notes import Note, forbidding_first
from ..report import Section, heat_map, settings_section, write_sections
from . import figures, tables
from .names import name_of
from .verdict import ratio_words

UNSAID = {"tokens": "from one token to the next", "layers": "from one layer to the next", "replay": "of caches"}
NOTES_SHOWN = 20


def write_assessment(path: Path, values: dict[str, Any]) -> None:
    """Write the HTML report of what `assess` gave; the values themselves are inside, as JSON with the id "data"."""
    write_sections(
        path,
        title=f"What can be gained: {values['model'] or 'a recorded model'}",
        lead=values["verdict"]["sentence"],
        summary=_summary(values),
        sections=[
            *_notes(values),
            *([] if values["gains"] is None else [_gains(values), _curves(values)]),
            *(_signals(stack, found) for stack, found in values["signals"].items()),
            _overlap(values),
            _hot_set(values),
            _load(values),
            _repetition(values),
            settings_section(_settings(values)),
        ],
        data=values,
    )


def _summary(values: Mapping[str, Any]) -> list[str]:
    counted, replayed = values["counted"], values["replayed"]
    of = f"{counted['of_sequences']} sequences, {counted['tokens']} of {counted['of_tokens']} tokens"
    what = (
        f"Trace {values['trace']}: {values['topology']}, {values['experts']} experts in all. Counted: "
        f"{counted['sequences']} of {of} ({counted['drawn']})."
    )
    if replayed is None:
        return [f"{what} Nothing was replayed, so that there are no misses, no gains and no times."]
    accesses = f"{replayed['tokens']} tokens, {values['curves']['accesses']} accesses"
    return [
        f"{what} Replayed as {values['as']}, on a cache that is empty at "
        f"first: {replayed['sequences']} sequences, {accesses} ({replayed['drawn']}).",
        "A miss is an expert that is needed and not in a slot; on demand, compute waits for it. The limit is what "
        "perfect foresight would take: compute alone, or reading the fewest possible misses, whichever is longer.",
    ]


def _notes(values: Mapping[str, Any]) -> list[Section]:
    """List what the import of the trace noted, and what that leaves unsaid."""
    notes = forbidding_first(Note(**note) for note in values["notes"])
    if not notes:
        return []
    limits = values["limits"]
    lines = [f"Nothing is said {words}: {limits[key]}." for key, words in UNSAID.items() if limits[key] is not None]
    lines += [f"{note.kind.replace('_', ' ')}: {note.sentence}" for note in notes[:NOTES_SHOWN]]
    if len(notes) > NOTES_SHOWN:
        lines.append(f"{len(notes) - NOTES_SHOWN} more notes are in the values that this page carries.")
    return [Section(title="Notes of the import", lines=lines)]


def _gains(values: Mapping[str, Any]) -> Section:
    gains, verdict, machine = values["gains"], values["verdict"], values["machine"]
    lines = [f"The best free policy here is {name_of(gains['free_policy'])}; {_signal_words(gains['signal'])}."]
    if gains["lru_over_belady_interval"] is not None:
        low, high = gains["lru_over_belady_interval"]
        lines[0] += (
            f" LRU misses {gains['lru_over_belady']:.2f} x as often as Belady ({low:.2f} to {high:.2f}, 95 % over "
            "sequences)."
        )
    if machine is None:
        lines.append("No machine was named, so there are no times: the gains are the largest that any could show.")
    elif machine["missing"]:
        lines.append(f"There are no times: the {' and the '.join(machine['missing'])} must be known too.")
    else:
        lines.append(
            f"{machine['name']}: {machine['link']}, {machine['block_ms']:.3g} ms a read of "
            f"{machine['expert_bytes'] / 2**20:.4g} MiB, {machine['resident_ms']:.3g} ms of compute a token; even the "
            f"limit takes {gains['limit_over_resident']:.2f} x the resident model's time."
        )
    if verdict["worth_between"] is not None:
        between = ratio_words(verdict["worth_between"])
        lines.append(
            "If nothing overlaps on demand, training is worth it on machines where reading LRU's misses takes "
            f"{between} the compute of a token."
        )
    drawn = []
    if gains["tokens_per_s"] is not None:
        drawn.append(("Tokens per second of each way to serve the replayed tokens.", figures.rate_figure(dict(values))))
    told = [("Gains over LRU on demand, at most; reads are misses of the cache per token.", tables.gain_rows(values))]
    if gains["tokens_per_s"] is not None:
        told.append(("Tokens per second, and over LRU on demand.", tables.rate_rows(values)))
    return Section(title="Gains", lines=lines, figures=drawn, tables=told)


def _signal_words(signal: str | None) -> str:
    if signal is None:
        return "no free signal could be measured"
    return f"the free signal that covers most misses is the {name_of(signal)}"


def _curves(values: Mapping[str, Any]) -> Section:
    told = [
        ("Miss rate by experts in slots; recovered: share of the way from LRU to Belady.", tables.curve_rows(values))
    ]
    rates = tables.curve_rows(values, "tokens_per_s")
    if rates:
        told.append(("Tokens per second on demand, by experts in slots.", rates))
    return Section(
        title="Miss rates over capacity",
        lines=[f"The static hot set was chosen on {values['curves']['static_fitted_on']}."],
        figures=[("Miss rate of every policy over the share of experts in slots.", figures.curve_figure(dict(values)))],
        tables=told,
    )


def _signals(stack: str, found: Mapping[str, Any]) -> Section:
    title = f"Free signals ({stack})"
    if not found["signals"]:
        return Section(title=title, lines=[f"None could be measured: {found['reason'] or 'all had to be left out'}."])
    drawn = []
    if all(signal["coverage"] for signal in found["signals"].values()):
        drawn.append(
            (
                f"Misses of {name_of(found['misses_of'])} that each signal covers, by experts fetched per miss.",
                figures.coverage_figure(dict(found)),
            )
        )
    covers = ""
    if found["misses_of"] is not None:
        covers = (
            " Recall counts all experts of a token, coverage only those that the cache misses: what is resident needs "
            "no prefetch."
        )
    lines = [
        f"Fitted on {found['fitted_on']} sequences, measured on {found['measured_on']} others; chance would name "
        f"{tables.share(found['chance'])}.{covers}",
    ]
    if found["left_out"]:
        lines.append(f"Left out, as the notes forbid it: {', '.join(map(name_of, found['left_out']))}.")
    caption = "Recall when naming top-k, its interval over sequences"
    caption += ", and covered misses by experts fetched per miss." if covers else "."
    return Section(title=title, lines=lines, figures=drawn, tables=[(caption, tables.signal_rows(found))])


def _overlap(values: Mapping[str, Any]) -> Section:
    if not values["overlap"]:
        return Section(title="Overlap from token to token", lines=[f"None is given: {values['limits']['tokens']}."])
    return Section(
        title="Overlap from token to token",
        figures=[
            (
                "Share of a token's experts that the tokens before it used, by MoE layer; dotted: what independent "
                "routing with the same popularity would show.",
                figures.overlap_figure(dict(values)),
            )
        ],
        tables=[("Overlap, all layers together, with its interval over sequences.", tables.overlap_rows(values))],
    )


def _hot_set(values: Mapping[str, Any]) -> Section:
    caption = "Share of the accesses that the most used experts serve."
    return Section(
        title="Hot set",
        figures=[(caption, figures.hot_set_figure(dict(values)))],
        tables=[("Share served by the hottest.", tables.hot_set_rows(values))],
    )


def _load(values: Mapping[str, Any]) -> Section:
    load = values["load"]
    mean = load["mean"]
    return Section(
        title="Expert load",
        lines=[
            f"Mean over layers: entropy {tables.number(mean['entropy'], 3)} of uniform, largest over mean load "
            f"{tables.number(mean['max_over_mean'])}, Gini {tables.number(mean['gini'], 3)}. "
            f"{tables.share(load['never_used'])} of the experts were never used, {tables.share(load['dropped'])} of "
            "the choices were dropped.",
        ],
        figures=[
            ("Share of each MoE layer's choices that every expert got.", heat_map(figures.load_array(load))),
            (
                "Entropy of the load over that of uniform load, and largest over mean load.",
                figures.balance_figure(load),
            ),
        ],
        tables=[("Balance of every MoE layer.", tables.load_rows(load))],
    )


def _repetition(values: Mapping[str, Any]) -> Section:
    stacks = values["contamination"]["stacks"].values()
    lines = []
    if any(found["by"] == "routing" for found in stacks):
        lines.append("Without token ids only duplicates are known, by their routing.")
    told = [("Repeated text, share of the tokens.", tables.repetition_rows(values))]
    without = tables.without_rows(values)
    if without:
        told.append(("The same sequences with and without it.", without))
    return Section(title="Repetition", lines=lines, tables=told)


def _settings(values: Mapping[str, Any]) -> dict[str, Any]:
    shown = {name: values[name] for name in ("trace", "model", "as", "capacity")}
    machine = values["machine"] or {}
    shown |= {f"machine {name}": value for name, value in machine.items() if name != "missing"}
    return {**shown, "foregate": importlib.metadata.version("foregate"), "numpy": importlib.metadata.version("numpy")}
