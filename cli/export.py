"""Export a training checkpoint as a bundle, measured on its test sequences."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..collect.errors import DataError
from ..collect.mistaken import what_is
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
    _check_checkpoint(Path(args.checkpoint))
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


def _check_checkpoint(path: Path) -> None:
    """Refuse what is no file before anything slow is imported."""
    usual = "name a .ckpt file of the run folder of foregate train, which is OUT.run"
    if path.is_dir():
        found = next((str(item) for item in sorted(path.rglob("*.ckpt"))), None)
        what = what_is(path) or "a folder"
        raise DataError(f"{path} is {what}, no checkpoint; {f'give one in it, such as {found}' if found else usual}.")
    if not path.is_file():
        raise DataError(f"The checkpoint {path} does not exist; {usual}.")
