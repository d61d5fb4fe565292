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
    made.add_argument("--push", type=str, help="OWNER/NAME on the Hugging Face Hub to push the bundle to, too")
    add_json(made)
    return made


def run(args: Any) -> int:
    """Export, push where asked for, and print what the bundle is worth."""
    from ..predictors.hub import check_target, push_to_hub

    _check_checkpoint(Path(args.checkpoint))
    if args.push is not None:
        check_target(args.push)  # exporting takes a while
    from ..train.export import data_of, export
    from ..train.module import PredictorModule

    module = PredictorModule.load(args.checkpoint)
    bundle = export(module, data_of(module, args.trace), args.out)
    pushed = None if args.push is None else push_to_hub(bundle, args.push)
    card = bundle.card
    if args.json:
        made = {"bundle": args.out, "family": bundle.spec.family, "metrics": card["metrics"], "pushed": pushed}
        print(json.dumps(made))
    else:
        recall = card["metrics"]["recall_at_k"]
        print(f"{args.out}: {bundle.spec.family}, recall at top-k {recall:.3f} on unseen sequences")
        print(card["verdict"])
        if pushed is not None:
            print(f"Pushed: {pushed}")
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
