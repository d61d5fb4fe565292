"""One HTML page from a run: comparison table, routing heat map, hit rates; opens without a network. Knows numbers."""

from __future__ import annotations

import html
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..collect.staging import staged_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #1a1a1a; }
table { border-collapse: collapse; margin: 1rem 0; }
th, td { border-bottom: 1px solid #d5d5d5; padding: .3rem .8rem; text-align: right; }
th:first-child, td:first-child { text-align: left; }
figure { margin: 1.5rem 0; } figcaption { color: #555; } svg { max-width: 100%; height: auto; }
"""


def write_report(
    path: Path,
    *,
    title: str,
    summary: Sequence[str],
    table: Sequence[Mapping[str, str]],
    figures: Sequence[tuple[str, Figure]],
    settings: Mapping[str, Any],
) -> None:
    """Write the page; figures become inline SVG, and all text is escaped.

    Args:
        table: one mapping per row, all with the same keys.
        figures: (caption, figure) pairs.
        settings: configuration and versions, listed at the end.
    """
    parts = [f"<h1>{html.escape(title)}</h1>"]
    parts += [f"<p>{html.escape(line)}</p>" for line in summary]
    parts.append(_table(table))
    for caption, figure in figures:
        parts.append(f"<figure>{_svg(figure)}<figcaption>{html.escape(caption)}</figcaption></figure>")
    parts.append("<h2>Settings and versions</h2>")
    parts.append(_table([{"setting": name, "value": str(value)} for name, value in settings.items()]))
    body = "\n".join(parts)
    page = (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f"<style>{STYLE}</style></head>\n<body>\n{body}\n</body></html>\n"
    )
    with staged_file(path) as file:
        file.write(page.encode())


def heat_map(load_LE: np.ndarray) -> Figure:
    """Draw the share of each layer's choices that every expert got, [L, E]."""
    figure = _figure(8.0, 0.9 + 0.28 * len(load_LE))
    axes = figure.subplots()
    share = load_LE / np.maximum(1, load_LE.sum(axis=1, keepdims=True))
    image = axes.imshow(100 * share, aspect="auto", cmap="viridis", vmin=0)
    axes.set_xlabel("expert")
    axes.set_ylabel("MoE layer")
    axes.set_yticks(range(len(load_LE)))
    figure.colorbar(image, ax=axes, label="% of choices")
    return figure


def hit_rates(by_layer: Mapping[str, Sequence[float]]) -> Figure:
    """Draw the hit rate of every MoE layer, one line per arm."""
    figure = _figure(8.0, 3.2)
    axes = figure.subplots()
    for name, rates in by_layer.items():
        axes.plot(range(len(rates)), [100 * rate for rate in rates], marker="o", label=name)
    axes.set_xlabel("MoE layer")
    axes.set_ylabel("hit rate, %")
    axes.set_ylim(0, 100)
    axes.set_xticks(range(max(map(len, by_layer.values()), default=0)))
    axes.grid(alpha=0.3)
    axes.legend()
    return figure


def _figure(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure  # half a second to import, and only reports need it

    return Figure(figsize=(width, height), layout="constrained")


def _svg(figure: Figure) -> str:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg")
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def _table(rows: Sequence[Mapping[str, str]]) -> str:
    if not rows:
        return ""
    head = "".join(f"<th>{html.escape(name)}</th>" for name in rows[0])
    body = "\n".join(
        "<tr>" + "".join(f"<td>{html.escape(value)}</td>" for value in row.values()) + "</tr>" for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table>"
