"""HTML pages from numbers: tables, captions, figures as inline SVG; they open without a network. Know no traces."""

from __future__ import annotations

import html
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..collect.staging import staged_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #1a1a1a; }
h1, h2 { overflow-wrap: anywhere; }
h2 { margin: 2.2rem 0 .4rem; border-top: 1px solid #d5d5d5; padding-top: 1rem; }
.lead { font-size: 1.12rem; background: #eef3f8; border-left: 5px solid #2a5d8f; padding: .8rem 1rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; margin: 1rem 0; font-variant-numeric: tabular-nums; }
caption { caption-side: top; text-align: left; color: #555; padding-bottom: .3rem; }
th, td { border-bottom: 1px solid #d5d5d5; padding: .3rem .6rem; text-align: right; }
td { white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
figure { margin: 1.5rem 0; } figcaption { color: #555; } svg { max-width: 100%; height: auto; }
"""

TALLEST = 9.0  # inches of a heat map: about a screen
Rows = Sequence[Mapping[str, str]]


@dataclass(frozen=True, kw_only=True)
class Section:
    """One part of a page, in this order: title, lines, figures, tables."""

    title: str
    """Heading."""
    lines: Sequence[str] = ()
    """Paragraphs."""
    figures: Sequence[tuple[str, Figure]] = ()
    """(caption, figure) pairs."""
    tables: Sequence[tuple[str, Rows]] = ()
    """(caption, rows) pairs; the rows of one table have the same keys."""


def write_report(
    path: Path,
    *,
    title: str,
    summary: Sequence[str],
    table: Rows,
    figures: Sequence[tuple[str, Figure]],
    settings: Mapping[str, Any],
) -> None:
    """Write the page of one run; figures become inline SVG, and all text is escaped.

    Args:
        table: one mapping per row, all with the same keys.
        figures: (caption, figure) pairs.
        settings: configuration and versions, listed at the end.
    """
    parts = [f"<p>{html.escape(line)}</p>" for line in summary]
    parts += [_table(table), *(_figure_part(caption, figure) for caption, figure in figures)]
    parts += _section(settings_section(settings))
    _write(path, title, parts)


def write_sections(
    path: Path, *, title: str, lead: str, summary: Sequence[str], sections: Sequence[Section], data: Any = None
) -> None:
    """Write a page of several sections; figures become inline SVG, and all text is escaped.

    Args:
        lead: the sentence that stands out.
        data: JSON values that the page carries along, as <script type="application/json" id="data">.
    """
    parts = [f'<p class="lead">{html.escape(lead)}</p>', *(f"<p>{html.escape(line)}</p>" for line in summary)]
    for section in sections:
        parts += _section(section)
    if data is not None:
        text = json.dumps(data, allow_nan=False).replace("<", "\\u003c")  # a "</script>" inside would end it
        parts.append(f'<script type="application/json" id="data">{text}</script>')
    _write(path, title, parts)


def settings_section(settings: Mapping[str, Any]) -> Section:
    """List configuration and versions."""
    rows = [{"setting": name, "value": str(value)} for name, value in settings.items()]
    return Section(title="Settings and versions", tables=[("", rows)])


def heat_map(load_LE: np.ndarray) -> Figure:
    """Draw the share of each layer's choices that every expert got, [L, E]; nan where there is no expert."""
    figure = new_figure(8.0, min(0.9 + 0.28 * len(load_LE), TALLEST))
    axes = figure.subplots()
    share = load_LE / np.maximum(1, np.nansum(load_LE, axis=1, keepdims=True))
    image = axes.imshow(100 * share, aspect="auto", cmap="viridis", vmin=0)
    axes.set_xlabel("expert")
    axes.set_ylabel("MoE layer")
    axes.set_yticks(range(0, len(load_LE), 1 + len(load_LE) // 40))  # more labels than 40 would touch
    figure.colorbar(image, ax=axes, label="% of choices")
    return figure


def hit_rates(by_layer: Mapping[str, Sequence[float]]) -> Figure:
    """Draw the hit rate of every MoE layer, one line per arm."""
    figure = new_figure(8.0, 3.2)
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


def new_figure(width: float, height: float) -> Figure:
    """Make an empty figure, in inches."""
    from matplotlib.figure import Figure  # half a second to import, and only reports need it

    return Figure(figsize=(width, height), layout="constrained")


def _write(path: Path, title: str, parts: Sequence[str]) -> None:
    body = "\n".join(parts)
    page = (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f'<link rel="icon" href="data:,"><style>{STYLE}</style></head>\n'  # else a browser asks a server for an icon
        f"<body>\n<h1>{html.escape(title)}</h1>\n{body}\n</body></html>\n"
    )
    with staged_file(path) as file:
        file.write(page.encode())


def _section(section: Section) -> list[str]:
    parts = [f"<h2>{html.escape(section.title)}</h2>", *(f"<p>{html.escape(line)}</p>" for line in section.lines)]
    parts += [_figure_part(caption, figure) for caption, figure in section.figures]
    return parts + [_table(rows, caption) for caption, rows in section.tables]


def _figure_part(caption: str, figure: Figure) -> str:
    text = html.escape(caption)
    svg = _svg(figure).replace("<svg", f'<svg role="img" aria-label="{text}"', 1)
    return f"<figure>{svg}<figcaption>{text}</figcaption></figure>"


def _svg(figure: Figure) -> str:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def _table(rows: Rows, caption: str = "") -> str:
    if not rows:
        return ""
    head = "".join(f"<th>{html.escape(name)}</th>" for name in rows[0])
    body = "\n".join(
        "<tr>" + "".join(f"<td>{html.escape(value)}</td>" for value in row.values()) + "</tr>" for row in rows
    )
    told = f"<caption>{html.escape(caption)}</caption>" if caption else ""
    table = f"<table>{told}<thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table>"
    return f'<div class="scroll">{table}</div>'
