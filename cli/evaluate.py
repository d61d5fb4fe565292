"""Evaluate a bundle on the sequences of a trace that its training has not seen."""

from __future__ import annotations

import json
from typing import Any

from ..collect.errors import BundleError
from ..collect.mistaken import require_kind
from ..collect.wording import counted
from .options import add_json


def parser() -> Any:
    """Build the parser of `foregate evaluate`."""
    import jsonargparse

    made = jsonargparse.ArgumentParser(
        prog="foregate evaluate", description="Measure a bundle on a trace, beside the free baselines."
    )
    made.add_argument("bundle", type=str, help="folder of a predictor bundle")
    made.add_argument("trace", type=str, help="folder of a trace, or an .npz file")
    add_json(made)
    return made


def run(args: Any) -> int:
    """Print recall, its interval, the baselines and the latency."""
    wrong = require_kind(args.bundle, "card.json", "give a folder written by foregate train.")
    if wrong is not None:
        raise BundleError(wrong)
    from ..train.evaluate import evaluate

    report = evaluate(args.bundle, args.trace)
    if args.json:
        print(json.dumps(report))
        return 0
    low, high = report["interval"]
    unseen, tokens = counted(report["sequences"], "unseen sequence"), counted(report["tokens"], "token")
    left_out = counted(report["left_out"], "sequence was", "sequences were")
    print(f"{args.bundle}: {report['family']} on {unseen}, {tokens} ({left_out} in its training)")
    print(f"  {'recall at top-k':<16} {report['recall_at_k']:.3f}  ({low:.3f} to {high:.3f}, 95 % over sequences)")
    for name, value in sorted(report["baselines"].items(), key=lambda item: -item[1]):
        print(f"  {name:<16} {value:.3f}")
    print(f"  baselines fitted on the {report['baselines_fitted_on'].removeprefix('the ')}")
    print(f"  latency on one core {report['latency_ms']['p50']:.2f} ms (p99 {report['latency_ms']['p99']:.2f})")
    return 0
