"""Figures of an evaluation, from its plain values. Knows matplotlib; computes nothing but percentages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ..runtime.assessment.names import name_of
from ..runtime.report import new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

OWN = "predictor"
CEILING = "oracle"
# The Okabe-Ito colours, which people with any colour vision can tell apart; the predictor is drawn heavier.
COLOURS = {
    OWN: "#0072B2",
    "token_table": "#E69F00",
    "layer_pair": "#CC79A7",
    "previous_token": "#009E73",
    "popularity": "#56B4E9",
    "random": "#999999",
    CEILING: "#000000",
}
MARKS = dict(zip(COLOURS, "osDv^xP", strict=True))


def lines_of(report: dict[str, Any], *, ceiling: bool = False) -> dict[str, dict[str, Any]]:
    """Give the figures of the predictor and of what it is measured beside, the best first."""
    free = sorted(report["free"].items(), key=lambda item: -item[1]["recall_at_k"])
    above = {CEILING: report[CEILING]} if ceiling and report[CEILING] is not None else {}
    return above | {OWN: report} | dict(free)


def layer_figure(report: dict[str, Any]) -> Figure:
    """Draw recall when naming top-k, of every MoE layer."""
    figure = new_figure(8.0, 3.8)
    axes = figure.subplots()
    for name, values in lines_of(report).items():
        recall = _percent(values["per_layer"])
        _line(axes, name, np.arange(len(recall)), recall)
    axes.set_xlabel("MoE layer")
    _whole(axes)
    return _finished(figure, axes)


def curve_figure(report: dict[str, Any]) -> Figure:
    """Draw recall over the number of experts named per layer."""
    figure = new_figure(8.0, 3.8)
    axes = figure.subplots()
    for name, values in lines_of(report, ceiling=True).items():
        points = sorted((int(k), recall) for k, recall in values["recall_at"].items() if k.isdigit())
        _line(axes, name, np.array([k for k, _ in points]), _percent([recall for _, recall in points]))
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xlabel("experts named per layer")
    return _finished(figure, axes)


def position_figure(report: dict[str, Any]) -> Figure:
    """Draw recall when naming top-k over the place in the sequence."""
    figure = new_figure(8.0, 3.8)
    axes = figure.subplots()
    names = list(report["positions"])
    for name, values in lines_of(report).items():
        recall = _percent([values["positions"].get(bucket) for bucket in names])
        _line(axes, name, np.arange(len(names)), recall)
    axes.set_xticks(range(len(names)), names)
    axes.set_xlabel("tokens before the token")
    return _finished(figure, axes)


def reliability_figure(report: dict[str, Any]) -> Figure:
    """Draw the share that came true over what was predicted, before and after the temperature."""
    curve = report["calibration"]
    figure = new_figure(8.0, 4.2)
    axes = figure.subplots()
    axes.plot([0, 100], [0, 100], color="#555555", linestyle=":", label="honest")
    told = (("as predicted", curve, "o-", COLOURS[OWN]), ("with its temperature", curve["after"], "s--", "#D55E00"))
    for label, values, style, colour in told:
        error = f"{label}, expected error {100 * values['expected_error']:.2f} %"
        axes.plot(
            _percent(values["predicted"]), _percent(values["observed"]), style, color=colour, markersize=4, label=error
        )
    axes.set_xlabel("predicted probability of use, %")
    axes.set_ylabel("came true, %")
    axes.set_xlim(0, 100)
    axes.set_ylim(0, 100)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=9, loc="upper left")
    return figure


def _line(axes: Axes, name: str, x: np.ndarray, y: np.ndarray) -> None:
    heavy = name == OWN
    axes.plot(
        x,
        y,
        color=COLOURS[name],
        marker=MARKS[name],
        markersize=5 if heavy else 4,
        linewidth=2.6 if heavy else 1.2,
        linestyle="--" if name == CEILING else "-",
        zorder=3 if heavy else 2,
        label=name_of(name),
    )


def _finished(figure: Figure, axes: Axes) -> Figure:
    axes.set_ylabel("recall, %")
    axes.set_ylim(0, 103)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=9, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def _whole(axes: Axes) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _percent(values: list[float | None]) -> np.ndarray:
    return 100 * np.array([np.nan if value is None else value for value in values], np.float64)
