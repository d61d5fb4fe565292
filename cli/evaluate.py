"""Evaluate a bundle on the sequences of a trace that its training has not seen."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..collect.errors import BundleError, SettingError
from ..collect.mistaken import require_kind
from .options import add_json

if TYPE_CHECKING:
    from ..collect.trace import SequenceRouting
    from ..predictors.base import Predictor

CAPACITY = 0.25  # of all experts, at which the recovered share is measured
TABLE_WIDTH = 120


def parser() -> Any:
    """Build the parser of `foregate evaluate`."""
    import jsonargparse

    made = jsonargparse.ArgumentParser(
        prog="foregate evaluate", description="Measure a bundle on a trace, beside what is free at the same horizon."
    )
    made.add_argument("bundle", type=str, help="folder of a predictor bundle, or hub:OWNER/NAME[@REVISION]")
    made.add_argument("trace", type=str, help="folder of a trace, or an .npz file")
    made.add_argument("--by", type=str, default=None, help="category: add rows for each category of the trace")
    made.add_argument("--out", type=str, default=None, help="HTML report to write, a new file")
    add_json(made)
    return made


def run(args: Any) -> int:
    """Print what it is worth at each horizon, and write the page where asked for."""
    from ..predictors.hub import local_bundle

    page = None if args.out is None else _page(args.out)
    bundle = local_bundle(args.bundle)
    wrong = require_kind(bundle, "card.json", "give a folder written by foregate train.")
    if wrong is not None:
        raise BundleError(wrong)
    from ..train.evaluate import evaluate

    report = {"bundle": args.bundle, "trace": args.trace, **evaluate(bundle, args.trace, by=args.by, recover=_recover)}
    if page is not None:
        from .evaluation_page import write_evaluation

        write_evaluation(page, report)
        report["report"] = str(page)
    if args.json:
        print(json.dumps(report, allow_nan=False))
        return 0
    _print(report)
    return 0


def _recover(predictor: Predictor, rows: Sequence[SequenceRouting]) -> float | None:
    """Give the recovered share of decoding from a cold cache."""
    from ..runtime.simulation import recovered_share_of

    return recovered_share_of(predictor, rows, predictor.spec.topology, CAPACITY)["predicted"].recovered_share


def _page(out: str) -> Path:
    """Give the page's path before anything slow starts."""
    path = Path(out)
    if path.suffix.lower() not in (".html", ".htm"):
        raise SettingError(f"out must end in .html, got {out}.")
    if path.exists() or path.is_symlink():
        raise SettingError(f"{path} exists already; give --out another name or remove it.")
    if not path.parent.is_dir():
        raise SettingError(f"{path.parent} is no folder; give --out a path in an existing folder.")
    return path


def _print(report: dict[str, Any]) -> None:
    from rich.console import Console

    from .evaluation_page import summary
    from .evaluation_table import category_rows, signal_rows

    console = Console(width=max(TABLE_WIDTH, Console().width))  # a narrow terminal wraps lines; nothing is cut
    console.print(f"{report['bundle']}: {report['family']}", highlight=False, markup=False)
    for line in summary(report):
        console.print(f"  {line}", highlight=False, markup=False)
    for name, values in report["horizons"].items():
        _print_table(console, f"{name} horizon: in %, naming top-k; 95 % interval over sequences", signal_rows(values))
        if values.get("by_category"):
            _print_table(console, f"{name} horizon by category, in %", category_rows(values))
        console.print(values["verdict"], highlight=False, markup=False)
    if "report" in report:
        console.print(f"Report: {report['report']}", highlight=False, markup=False)


def _print_table(console: Any, title: str, rows: list[dict[str, str]]) -> None:
    from rich.box import SIMPLE
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=title, box=SIMPLE, title_justify="left")
    for index, name in enumerate(rows[0]):
        table.add_column(name, justify="right" if index else "left", no_wrap=True)
    for row in rows:
        table.add_row(*map(escape, row.values()))
    console.print(table)
