"""The table of families: what of recording, offloading and verifying holds for each MoE family of transformers.

The table is data that a check produced (`family_check`), for one version of transformers. Families that the installed
version has beside it are rows too, tried by nobody. Knows names and words; loads no torch.
"""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Literal

from ..collect.errors import SettingError
from ..collect.families import moe_families
from ..collect.wording import ending

Verdict = Literal["validated", "unsupported"]
COLUMNS = ("record", "offload", "verify")
TABLE = "families.json"
LISTS_FAMILIES = "; 'foregate families' lists them."


@dataclass(frozen=True, kw_only=True, slots=True)
class FamilyRow:
    """Say what holds for one family."""

    model_type: str
    """Name of its folder in transformers, which is its `model_type` in config.json but for a few."""
    record: Verdict
    """A tiny random model's routing is recorded, prompts and generation, with every self-check."""
    offload: Verdict
    """It is packed, runs with few slots, routes alike and gives the resident model's bits in float32 and bfloat16."""
    verify: Verdict
    """`foregate verify` compares it, with its checkpoint and with the store's own bytes."""
    reason: str = ""
    """Why something is unsupported; else what there is to know, or nothing."""

    @property
    def validated(self) -> bool:
        """Whether everything holds."""
        return all(getattr(self, column) == "validated" for column in COLUMNS)

    def to_json(self) -> dict[str, str]:
        """Give the row as plain JSON values."""
        return asdict(self)


def family_table() -> list[FamilyRow]:
    """List the families of the installed transformers, sorted by name."""
    known = {row.model_type: row for row in _packaged()[1]}
    return [known.get(name) or untried(name) for name in moe_families()]


def untried(name: str) -> FamilyRow:
    """Give the row of a family that the table does not have."""
    reason = f"new in transformers {installed_version()}: nobody has tried it with this foregate"
    return FamilyRow(model_type=name, record="unsupported", offload="unsupported", verify="unsupported", reason=reason)


def table_version() -> str:
    """Give the version of transformers that the table was made with."""
    return _packaged()[0]


def installed_version() -> str:
    """Give the version of transformers that is installed."""
    return importlib.metadata.version("transformers")


def chosen_families(names: Sequence[str]) -> list[str]:
    """Give the families of these names; none gives all. Both `nllb_moe` and its model type `nllb-moe` are known.

    Raises:
        SettingError: if transformers has no such family.
    """
    known = moe_families()
    chosen = []
    for name in names:
        family = name
        if name not in known:
            from ..collect.families import family_of  # imports transformers

            family = family_of(name)
        if family not in known:
            raise SettingError(
                f"only must name MoE families of transformers {installed_version()}, got {name!r}"
                f"{ending(name, known, otherwise=LISTS_FAMILIES)}"
            )
        chosen.append(family)
    return chosen or list(known)


def counts(rows: Iterable[FamilyRow]) -> dict[str, int]:
    """Count the validated rows by column."""
    rows = list(rows)
    return {column: sum(getattr(row, column) == "validated" for row in rows) for column in COLUMNS}


def to_table(rows: Sequence[FamilyRow]) -> dict[str, Any]:
    """Give rows as the table is stored."""
    return {"transformers": installed_version(), "families": [row.to_json() for row in rows]}


def to_markdown(rows: Sequence[FamilyRow], version: str) -> str:
    """Write the table as a page."""
    number = counts(rows)
    lines = [
        "# Families",
        "",
        "<!-- Written by `foregate families --write docs/families.md`; a test compares the two. -->",
        "",
        f"The {len(rows)} mixture-of-experts families of transformers {version}: {number['record']} are recorded, "
        f"{number['offload']} run from a store with the resident model's bits, {number['verify']} can be verified. "
        "`foregate families --check` tries every row again, on a tiny random model of the family:",
        "",
        "- **record**: its routing is recorded, prompts and, where it generates, generation, with every self-check;",
        "- **offload**: it is packed, runs with few slots, routes alike, and its logits have the resident model's bits "
        "in float32 and bfloat16 (`grouped_mm`'s, or those of its own forward where it has no such choice);",
        "- **verify**: `foregate verify` compares it with its checkpoint and with the store's own bytes.",
        "",
        "A family is named after its folder in transformers; in `config.json`, nllb_moe is `nllb-moe` and inkling is "
        "`inkling_mm_model`. Weights, quantized checkpoints and kernels of real models are not tried here.",
        "",
        "| family | record | offload | verify | notes |",
        "|---|---|---|---|---|",
        *(f"| {row.model_type} | {row.record} | {row.offload} | {row.verify} | {row.reason} |" for row in rows),
        "",
    ]
    return "\n".join(lines)


@cache
def _packaged() -> tuple[str, list[FamilyRow]]:
    value = json.loads(files("foregate.runtime").joinpath(TABLE).read_text(encoding="utf-8"))
    return value["transformers"], [FamilyRow(**row) for row in value["families"]]
