"""Packaged settings: one YAML file per purpose, found by name with `--config NAME`. Knows files, not their meaning.

Kinds are the folders: `find_config("collect", "sst2")` is `collect/sst2.yaml` of this package. A name that is the path
of an existing file stands for that file.
"""

from __future__ import annotations

from difflib import get_close_matches
from importlib.resources import files
from pathlib import Path

FOLDER = Path(str(files(__name__)))


def config_names(kind: str) -> list[str]:
    """List the packaged configs of a kind, without their suffix."""
    return sorted(path.stem for path in (FOLDER / kind).glob("*.yaml"))


def find_config(kind: str, name: str | Path) -> Path:
    """Give the file of a packaged config by name, or of a path.

    Raises:
        ValueError: if there is neither such a file nor such a packaged config; the message lists the legal names.
    """
    path = Path(name)
    if path.is_file():
        return path
    names = config_names(kind)
    if str(name) in names:
        return FOLDER / kind / f"{name}.yaml"
    legal = f"one of {', '.join(names)}" if names else f"(no config of kind {kind} is packaged)"
    near = get_close_matches(str(name), names, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ", which is neither."
    raise ValueError(f"config must be the path of a YAML file or {legal}, got {str(name)!r}{hint}")
