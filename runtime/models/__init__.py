"""The mini models that ship with foregate, as plain transformers folders. Knows where they lie; loads nothing.

foregate-mini: Qwen3-MoE language model. foregate-mini-switch: Switch Transformers encoder-decoder for SST-2 and MRPC.
"""

from __future__ import annotations

import os
from difflib import get_close_matches
from pathlib import Path

from ...collect.errors import ModelError, SettingError

NAMES = ("foregate-mini", "foregate-mini-switch")
LIKE = 0.75  # likeness from which a name is taken for a misspelt one of these


def names() -> tuple[str, ...]:
    """Return the names that `path` takes."""
    return NAMES


def path(name: str) -> Path:
    """Return the folder of a mini model; `from_pretrained` takes it."""
    if name not in NAMES:
        raise SettingError(
            f"{name!r} is no mini model: use one of {', '.join(NAMES)}, or the folder of your own model."
        )
    return Path(__file__).parent / name


def find(name: str) -> str:
    """Give the folder of a mini model by its name; another folder, or a name on the hub, stays as it is.

    The hub is asked for what can be there only: it takes half a minute to say no where it cannot be reached.

    Raises:
        ModelError: if the name is a path to nothing, or a misspelt mini model.
    """
    if Path(name).is_dir():
        return name
    if name in NAMES:
        return str(path(name))
    legal = f"a model folder, one of {', '.join(NAMES)}, or a name on the Hugging Face hub"
    if Path(name).is_file():
        raise ModelError(f"{name} is a file, no model; give {legal}.")
    near = get_close_matches(name, NAMES, n=1, cutoff=LIKE)
    if near and "/" not in name:
        raise ModelError(f"There is no model folder {name!r}; did you mean {near[0]!r}?")
    owner, _, below = name.rstrip("/").rpartition("/")
    if Path(name).is_absolute() or name.startswith((".", "~")) or "/" in owner or (os.sep != "/" and os.sep in name):
        raise ModelError(f"There is no model folder {name}; give {legal}.")
    if owner and Path(owner).is_dir():
        raise ModelError(f"The folder {owner} holds no model or store {below}; give {legal}.")
    return name
