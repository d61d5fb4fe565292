"""Export a training checkpoint as a bundle, measured on its test sequences."""

from __future__ import annotations

import json
from typing import Any

from .options import add_json


def parser() -> Any:
    """Build the parser of `foregate export`."""
    import jsonargparse

    made = jsonargparse.ArgumentParser(
        prog="foregate export",
        description="Write the bundle of a checkpoint that foregate train left in its run folder.",
    )
    made.add_argument("checkpoint", type=str, help="a .ckpt file")
    made.add_argument("--out", type=str, required=True, help="folder of the bundle to write")
    made.add_argument("--trace", type=str, help="the trace it was trained on, where that has moved")
    add_json(made)
    return made


def run(args: Any) -> int:
    """Export, and print what the bundle is worth."""
    from ..train.export import data_of, export
    from ..train.module import PredictorModule

    module = PredictorModule.load(args.checkpoint)
    bundle = export(module, data_of(module, args.trace), args.out)
    if args.json:
        print(json.dumps({"bundle": args.out, "family": bundle.spec.family, "metrics": bundle.card["metrics"]}))
    else:
        recall = bundle.card["metrics"]["recall_at_k"]
        print(f"{args.out}: {bundle.spec.family}, recall at top-k {recall:.3f} on unseen sequences")
    return 0
