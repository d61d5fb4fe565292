"""Pack a model's experts into a store: a model folder whose experts are read on demand."""

from __future__ import annotations

import json
from typing import Any


def parser() -> Any:
    """Build the parser of `foregate pack`."""
    import jsonargparse

    from .options import add_json, spell_flags

    parser = jsonargparse.ArgumentParser(
        prog="foregate pack",
        description="Pack a model's experts into a store: one contiguous, aligned block per expert, checksummed.",
    )
    parser.add_argument("model", type=str, help="model folder, packaged mini model, or name on the Hugging Face hub")
    parser.add_argument("--out", type=str, required=True, help="folder to write, which must not exist yet")
    parser.add_argument("--trust_remote_code", type=bool, default=False, help="run model code that the model brings")
    add_json(parser)
    spell_flags(parser)
    return parser


def run(args: Any) -> int:
    """Write the store and print its size."""
    from ..runtime.pack import pack

    store = pack(args.model, args.out, trust_remote_code=args.trust_remote_code)
    files = (*store.manifest.expert_files, *store.manifest.dense_files)
    values = {
        "store": str(store.path),
        "experts": len(store),
        "block_bytes": store.block_bytes,
        "bytes": sum(file.nbytes for file in files),
        "fingerprint": store.fingerprint,
        "topology": store.topology.to_json(),
    }
    if args.json:
        print(json.dumps(values))
    else:
        print(
            f"{store.path}: {store.topology.describe()}, {len(store)} blocks of up to {store.block_bytes / 2**20:.3g} "
            f"MiB, {values['bytes'] / 2**30:.2f} GiB in all"
        )
    return 0
