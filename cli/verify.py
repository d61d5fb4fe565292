"""Compare a model that runs from a store with the resident model, bit for bit."""

from __future__ import annotations

import json
from typing import Any


def parser() -> Any:
    """Build the parser of `foregate verify`."""
    import jsonargparse

    from ..runtime.config import RuntimeConfig
    from .options import add_json, spell_flags

    jsonargparse.set_parsing_settings(docstring_parse_attribute_docstrings=True)
    parser = jsonargparse.ArgumentParser(
        prog="foregate verify",
        description="Compare an offloaded model's logits with the resident model's, bit for bit, and all bytes with "
        "their checksums. A quarter of the experts is held unless --slots or --budget says otherwise. The exit code "
        "is 1 where anything differs.",
    )
    parser.add_argument("model", type=str, help="store, or a model that is packed to a temporary store first")
    parser.add_argument("--tokens", type=int, default=64, help="new tokens to compare")
    parser.add_argument(
        "--reference", type=str, default=None, help="checkpoint to compare with; else the store's bytes"
    )
    parser.add_argument("--prompt", type=str, default=None, help="text to start from; else Python's documentation")
    parser.add_argument("--trust_remote_code", type=bool, default=False, help="run model code that the model brings")
    parser.add_class_arguments(RuntimeConfig, as_group=False)
    add_json(parser)
    spell_flags(parser)
    return parser


def run(args: Any) -> int:
    """Print what differs; exit code 1 where anything does."""
    from dataclasses import asdict

    from ..runtime.config import RuntimeConfig
    from ..runtime.verify import verify
    from .options import settings_from

    report = verify(
        args.model,
        tokens=args.tokens,
        reference=args.reference,
        prompt=args.prompt,
        trust_remote_code=args.trust_remote_code,
        **asdict(settings_from(args, RuntimeConfig)),
    )
    if args.json:
        print(json.dumps(report.to_json()))
    else:
        print(report.describe())
    return 0 if report.identical else 1
