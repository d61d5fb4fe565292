"""Check a trace: ids, weights, token ids, parts, dummy batches."""

from __future__ import annotations

import json
from itertools import islice
from typing import Any

MOST_PROBLEMS = 200  # a trace that is damaged throughout has one in every row


def parser() -> Any:
    """Build the parser of `foregate validate`."""
    import jsonargparse

    from .options import add_json

    parser = jsonargparse.ArgumentParser(
        prog="foregate validate", description="Check a trace. The exit code is 1 where a problem is found."
    )
    parser.add_argument("trace", type=str, help="folder of a trace, or an .npz file")
    add_json(parser)
    return parser


def run(args: Any) -> int:
    """Print what is wrong with the trace."""
    from ..collect.checks import check_trace

    found = list(islice(check_trace(args.trace), MOST_PROBLEMS + 1))
    problems, more = found[:MOST_PROBLEMS], len(found) > MOST_PROBLEMS
    if args.json:
        values = {"ok": not found, "problems": [problem.to_json() for problem in problems], "more": more}
        print(json.dumps(values))
    else:
        for problem in problems:
            print(problem)
        if more:
            print(f"... and more; the first {MOST_PROBLEMS} problems are shown.")
        print(f"{args.trace}: {'ok' if not found else 'not ok'}")
    return 0 if not found else 1
