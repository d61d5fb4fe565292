"""Import what another tool recorded, as a trace or a load table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..collect.errors import TraceError
from ..collect.importers.config import ImportConfig
from ..collect.wording import counted
from .foreign_source import check_models, check_source
from .options import settings_from, settings_parser


def parser() -> Any:
    """Build the parser of `foregate import`."""
    made = settings_parser("foregate import", ImportConfig, skip={"source"})
    made.add_argument("source", type=str, help="file of another tool, or folder of such files of one format")
    return made


def run(args: Any) -> int:
    """Import and print what was read, dropped and noted."""
    from ..collect.importing import import_source
    from ..collect.notes import note_lines

    config = settings_from(args, ImportConfig)
    check_source(Path(config.source))
    try:
        result = import_source(config)
    except TraceError as error:
        check_models(config, error)
        raise
    if args.json:
        print(json.dumps(result.to_json()))
        return 0
    report = result.report
    size = f", {counted(result.sequences, 'sequence')}, {counted(result.tokens, 'token')}" * (result.kind == "trace")
    print(f"{result.out}: {result.kind} from {result.format}, {result.described}{size}")
    print(f"rows read {report.rows_read}, kept {report.rows_kept}")
    for reason, count in sorted(report.rows_dropped.items()):
        print(f"dropped {count}: {reason}")
    for line in note_lines(report.notes):
        print(line)
    return 0
