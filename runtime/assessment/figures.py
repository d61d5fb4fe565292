"""Figures of an assessment, from its plain values. Knows matplotlib; computes nothing but percentages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ..report import new_figure
from .curves import BASE, OPTIMUM
from .names import name_of, rate_of
from .tables import WAYS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# The Okabe-Ito colours, which people with any colour vision can tell apart; LRU and Belady are drawn heavier.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#999999", "#B8A800", "#000000")
MARKS = "osv^DPX*h"


def curve_figure(values: dict[str, Any]) -> Figure:
    """Draw the miss rate of every policy over the share of experts in slots."""
    curves = values["curves"]
    figure = new_figure(8.0, 4.6)
    axes = figure.subplots()
    shares = [100 * share for share in curves["shares"]]
    for index, (name, policy) in enumerate(curves["policies"].items()):
        heavy = name in (BASE, OPTIMUM)
        colour = "#000000" if name == OPTIMUM else COLOURS[index % (len(COLOURS) - 1)]
        rates = [np.nan if rate is None else 100 * rate for rate in policy["miss_rate"]]
        axes.plot(
            shares,
            rates,
            color=colour,
            marker=MARKS[index % len(MARKS)],
            markersize=5 if heavy else 4,
            linewidth=2.6 if heavy else 1.2,
            linestyle="--" if name == OPTIMUM else "-",
            zorder=3 if heavy else 2,
            label=name_of(name),
        )
    _mark_capacity(axes, values)
    axes.set_xlabel("experts in slots, % of all")
    axes.set_ylabel("miss rate, %")
    axes.set_xlim(0, 101)
    axes.set_ylim(0, 103)
    axes.grid(alpha=0.3)
    axes.legend(ncols=2, fontsize=9)
    return figure


def rate_figure(values: dict[str, Any]) -> Figure:
    """Draw tokens per second of every way to serve the events."""
    rates = values["gains"]["tokens_per_s"]
    names = [name for name in WAYS if name in rates]
    figure = new_figure(8.0, 0.9 + 0.36 * len(names))
    axes = figure.subplots()
    colours = ["#0072B2" if WAYS[name].real else "#B9CFE0" for name in names]
    bars = axes.barh(range(len(names)), [rates[name] for name in names], color=colours)
    axes.bar_label(bars, labels=[rate_of(rates[name]) for name in names], padding=4)
    axes.set_yticks(range(len(names)), [WAYS[name].words for name in names])
    axes.invert_yaxis()
    axes.set_xlabel("tokens/s (pale: needs perfect foresight, or all experts resident)")
    axes.margins(x=0.12)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def coverage_figure(signals: dict[str, Any]) -> Figure:
    """Draw the share of the misses that each free signal covers over the experts fetched per miss, one stack."""
    figure = new_figure(8.0, 3.6)
    axes = figure.subplots()
    for index, (name, signal) in enumerate(signals["signals"].items()):
        at = [0.0, *(point["fetched_per_miss"] for point in signal["coverage"])]
        covered = [0.0, *(100 * point["covered_misses"] for point in signal["coverage"])]
        # popularity and previous token often coincide: a prefetcher has no use for what is resident already
        style = ("-", "--", "-", "-")[index % 4]
        axes.plot(at, covered, style, color=COLOURS[index], marker=MARKS[index], markersize=4, label=name_of(name))
    axes.plot([0, 1], [0, 100], color="#999999", linestyle=":", label="perfect foresight")
    axes.set_xlabel("experts fetched per miss")
    axes.set_ylabel("covered misses, %")
    axes.set_ylim(0, 103)
    axes.set_xlim(left=0)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=9, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def overlap_figure(values: dict[str, Any]) -> Figure:
    """Draw the overlap of every MoE layer, one line per window, beside the popularity level."""
    figure = new_figure(8.0, 3.8)
    axes = figure.subplots()
    for index, window in enumerate(values["overlap"]):
        layers = [layer["layer"] for layer in window["layers"]]
        lines = {
            "overlap": _percent([layer["overlap"] for layer in window["layers"]]),
            "popularity": _percent([layer["popularity"] for layer in window["layers"]]),
        }
        words = "previous token" if window["window"] == 1 else f"previous {window['window']} tokens"
        axes.plot(layers, lines["overlap"], marker="o", markersize=4, color=COLOURS[index], label=words)
        axes.plot(
            layers,
            lines["popularity"],
            color=COLOURS[index],
            linestyle=":",
            label="level of popularity" if index == len(values["overlap"]) - 1 else None,
        )
    axes.set_xlabel("MoE layer")
    axes.set_ylabel("overlap, %")
    axes.set_ylim(0, 103)
    _whole_layers(axes)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=9, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def hot_set_figure(values: dict[str, Any]) -> Figure:
    """Draw the share of the accesses that the hottest experts serve, on other sequences and in sample."""
    figure = new_figure(8.0, 3.6)
    axes = figure.subplots()
    shares = [100 * item["share"] for item in values["coverage"]]
    for label, key, style in (("on other sequences", "held_out", "o-"), ("in sample", "in_sample", "s--")):
        covered = _percent([item[key] for item in values["coverage"]])
        if not np.isnan(covered).all():
            colour = COLOURS[0] if key == "held_out" else COLOURS[1]
            axes.plot([0, *shares, 100], [0, *covered, 100], style, color=colour, markersize=4, label=label)
    axes.plot([0, 100], [0, 100], color="#999999", linestyle=":", label="uniform routing")
    axes.set_xlabel("hottest experts, % of all")
    axes.set_ylabel("accesses served, %")
    axes.set_xlim(0, 100)
    axes.set_ylim(0, 100)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=9)
    return figure


def balance_figure(load: dict[str, Any]) -> Figure:
    """Draw normalised entropy and largest over mean load of every MoE layer."""
    figure = new_figure(8.0, 3.8)
    upper, lower = figure.subplots(2, 1, sharex=True)
    layers = [layer["layer"] for layer in load["layers"]]
    upper.plot(layers, _numbers([layer["entropy"] for layer in load["layers"]]), "o-", color=COLOURS[0], markersize=4)
    upper.set_ylabel("entropy / uniform")
    upper.set_ylim(0, 1.05)
    lower.plot(
        layers, _numbers([layer["max_over_mean"] for layer in load["layers"]]), "o-", color=COLOURS[5], markersize=4
    )
    lower.set_ylabel("largest / mean load")
    lower.set_ylim(0, 1.08 * lower.dataLim.y1 if lower.dataLim.y1 > 0 else 1)
    lower.set_xlabel("MoE layer")
    _whole_layers(lower)
    for axes in (upper, lower):
        axes.grid(alpha=0.3)
    return figure


def load_array(load: dict[str, Any]) -> np.ndarray:
    """Give the counts as [L, E], nan beyond a layer's own experts."""
    width = max(len(counts) for counts in load["counts"])
    found = np.full((len(load["counts"]), width), np.nan)
    for index, counts in enumerate(load["counts"]):
        found[index, : len(counts)] = counts
    return found


def _whole_layers(axes: Axes) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _mark_capacity(axes: Axes, values: dict[str, Any]) -> None:
    share = 100 * values["capacity_share"]
    axes.axvline(share, color="#555555", linestyle=":", linewidth=1)
    axes.annotate(
        f"{values['capacity']} experts",
        (share, 0),
        xytext=(4, 4),
        textcoords="offset points",
        color="#555555",
        fontsize=9,
    )


def _percent(values: list[float | None]) -> np.ndarray:
    return 100 * _numbers(values)


def _numbers(values: list[float | None]) -> np.ndarray:
    return np.array([np.nan if value is None else value for value in values], np.float64)
