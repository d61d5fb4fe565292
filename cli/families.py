"""List the mixture-of-experts families and what works with each."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..runtime.families import FamilyRow

log = logging.getLogger(__name__)


def parser() -> Any:
    """Build the parser of `foregate families`."""
    import jsonargparse

    from .options import add_json, spell_flags

    parser = jsonargparse.ArgumentParser(
        prog="foregate families",
        description="List the mixture-of-experts families of the installed transformers: whether they are recorded, "
        "run from a store and verified. The exit code of --check is 1 where a row differs from the table.",
    )
    parser.add_argument("--check", action="store_true", help="try each row again on a tiny random model")
    parser.add_argument("--only", type=str, nargs="+", default=[], metavar="TYPE", help="model types; all by default")
    parser.add_argument(
        "--write",
        type=Path,
        default=None,
        metavar="FILE",
        help="write the rows to a file: .md as a page, .json as data",
    )
    add_json(parser)
    spell_flags(parser)
    return parser


def run(args: Any) -> int:
    """Print the table, tried again where asked for."""
    from ..collect.smoke import smoke
    from ..runtime.families import chosen_families, counts, family_table, installed_version, table_version

    names = chosen_families(args.only)
    table = {row.model_type: row for row in family_table()}
    if table_version() != installed_version():
        log.warning("the table is of transformers %s, installed is %s", table_version(), installed_version())
    if args.check:
        names = names[: smoke(len(names), 2)]
    rows = _checked(names) if args.check else [table[name] for name in names]
    if args.write is not None:
        _write(args.write, rows)
    if args.json:
        print(json.dumps([row.to_json() for row in rows]))
    else:
        _show(rows)
        found = ", ".join(f"{column} {number}" for column, number in counts(rows).items())
        print(f"{len(rows)} families of transformers {installed_version()}, validated: {found}")
    differing = [row for row in rows if row != table[row.model_type]]
    for row in differing:
        log.error(
            "%s differs from the table: now %s, there %s", row.model_type, _said(row), _said(table[row.model_type])
        )
    return 1 if differing else 0


def _checked(names: list[str]) -> list[FamilyRow]:
    import rich.console
    import rich.progress
    from transformers.utils import logging as transformers_logging

    from ..runtime.family_check import check_family

    console = rich.console.Console(stderr=True)
    program, before = logging.getLogger("foregate"), logging.getLogger("foregate").level
    bars = transformers_logging.is_progress_bar_enabled()
    program.setLevel(logging.WARNING)  # hundreds of small models would each be announced
    transformers_logging.disable_progress_bar()
    try:
        return [check_family(name) for name in rich.progress.track(names, "families", console=console)]
    finally:
        program.setLevel(before)
        if bars:
            transformers_logging.enable_progress_bar()


def _said(row: FamilyRow) -> str:
    return "/".join((row.record, row.offload, row.verify)) + (f" ({row.reason})" if row.reason else "")


def _show(rows: list[FamilyRow]) -> None:
    from rich.console import Console
    from rich.table import Table

    from ..runtime.families import COLUMNS

    table = Table("family", *COLUMNS, "notes", box=None)
    for row in rows:
        verdicts = (getattr(row, column) for column in COLUMNS)
        marks = (f"[green]{value}[/]" if value == "validated" else f"[red]{value}[/]" for value in verdicts)
        table.add_row(row.model_type, *marks, row.reason)
    Console().print(table)


def _write(path: Path, rows: list[FamilyRow]) -> None:
    from ..collect.errors import SettingError
    from ..collect.staging import staged_file
    from ..runtime.families import installed_version, to_markdown, to_table

    if path.suffix == ".md":
        text = to_markdown(rows, installed_version())
    elif path.suffix == ".json":
        text = json.dumps(to_table(rows), indent=1) + "\n"
    else:
        raise SettingError(f"write must name a .md or a .json file, got {path}.")
    with staged_file(path) as staged:
        staged.write(text.encode())
