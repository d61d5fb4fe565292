"""Widen a model's experts without changing its function, so that a small model moves as many bytes as a large one."""

from __future__ import annotations

import json
from typing import Any


def parser() -> Any:
    """Build the parser of `foregate inflate`."""
    import jsonargparse

    from .options import add_json, spell_flags

    parser = jsonargparse.ArgumentParser(
        prog="foregate inflate",
        description="Write a checkpoint with wider experts and the same function up to rounding: each hidden unit is "
        "repeated a power of two times and the down projection divided by it.",
    )
    parser.add_argument("model", type=str, help="model folder, packaged mini model, or name on the Hugging Face hub")
    parser.add_argument("--out", type=str, required=True, help="folder to write, which must not exist yet")
    parser.add_argument("--expert_mib", type=float, required=True, help="MiB per expert; the closest power of two wins")
    parser.add_argument("--trust_remote_code", type=bool, default=False, help="run model code that the model brings")
    add_json(parser)
    spell_flags(parser)
    return parser


def run(args: Any) -> int:
    """Write the checkpoint and print its factor."""
    from ..runtime.inflate import inflate

    result = inflate(args.model, args.out, expert_mib=args.expert_mib, trust_remote_code=args.trust_remote_code)
    if args.json:
        print(json.dumps(result.to_json()))
    else:
        print(
            f"{result.folder}: experts {result.factor} times as wide ({result.setting}), "
            f"{result.expert_bytes / 2**20:.3g} MiB each"
        )
    return 0
