"""Command line of the mini recipe: `python -m foregate.train.mini --config configs/mini/causal.yaml`."""

from __future__ import annotations

import logging
import sys

from ...collect.errors import ForegateError, SettingError
from .recipe import read_recipe


def main(args: list[str] | None = None) -> int:
    """Train a mini model and write it with its card; return the exit status."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
    log = logging.getLogger("foregate")
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        recipe = read_recipe(args)
        from .run import train_mini  # torch and transformers load only for settings that are legal

        train_mini(recipe)
    except ForegateError as error:
        sys.stderr.write(f"{error}\n")
        return 2 if isinstance(error, SettingError) else 1
    finally:
        log.removeHandler(handler)
    return 0


if __name__ == "__main__":
    sys.exit(main())
