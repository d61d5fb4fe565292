"""The mini models that ship with foregate, as plain transformers folders. Knows where they lie; loads nothing.

foregate-mini: Qwen3-MoE language model. foregate-mini-switch: Switch Transformers encoder-decoder for SST-2 and MRPC.
"""

from __future__ import annotations

from pathlib import Path

from ...collect.errors import SettingError

NAMES = ("foregate-mini", "foregate-mini-switch")


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
