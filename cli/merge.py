"""Merge traces of one model into a new trace."""

from __future__ import annotations

import json
from typing import Any


def parser() -> Any:
    """Build the parser of `foregate merge`."""
    import jsonargparse

    from .options import add_json

    parser = jsonargparse.ArgumentParser(
        prog="foregate merge",
        description="Write a new trace with the rows of several, each checked on the way. Their topology, model, "
        "tokenizer, dtype and kinds of weights and scores must agree, and no sequence may stand in two of them unless "
        "--rename tells them apart.",
    )
    parser.add_argument("traces", type=str, nargs="+", help="folders of traces, or .npz files")
    parser.add_argument("--out", type=str, required=True, help="folder of the new trace")
    parser.add_argument(
        "--rename",
        action="store_true",
        help="put the name of each source (its number where two names are equal) before its sequences and groups, as "
        "in en/my.txt:0",
    )
    parser.add_argument(
        "--keep-groups",
        action="store_true",
        help="with --rename: leave groups as they are, where equal ones mean the same document in every source",
    )
    add_json(parser)
    return parser


def run(args: Any) -> int:
    """Merge the traces and print the new one's size."""
    from ..collect.merge import merge

    result = merge(args.traces, args.out, rename=args.rename, keep_groups=args.keep_groups)
    if args.json:
        values = result._asdict() | {"trace": str(result.trace)}
        print(json.dumps(values))
    else:
        print(
            f"{result.trace}: {result.sequences} sequences, {result.tokens} tokens in {result.shards} shards, from "
            f"{result.sources} traces"
        )
    return 0
