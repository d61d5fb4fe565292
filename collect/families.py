"""Which model types of the installed transformers are mixtures of experts, found in its sources. Runs no model.

Two marks are looked for in each modelling file: a class behind the experts interface, or a router whose logits the
model can return. A type that a new version brings is found without a change here; a test holds the set that is found
to the families that were tried.
"""

from __future__ import annotations

import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path

INTERFACE = re.compile(r"^@use_experts_implementation\b", re.MULTILINE)
ROUTER = re.compile(r"""["']router_logits["']\s*:""")

NOT_FOUND_BY_STRUCTURE: tuple[str, ...] = ()
"""Families that neither mark finds."""

NO_EXPERTS = {"doge": "its experts are rows of two embedding tables, not modules with weights of their own"}
"""Families with a router but nothing to record or offload, and why."""


@cache
def moe_families() -> tuple[str, ...]:
    """List the mixture-of-experts families of the installed transformers by the names of their folders, sorted."""
    spec = find_spec("transformers")  # its files, without a second of importing it
    assert spec is not None
    assert spec.submodule_search_locations is not None
    models = Path(spec.submodule_search_locations[0]) / "models"
    found = {path.parent.name for path in models.glob("*/modeling_*.py") if _routes(path)}
    return tuple(sorted((found | set(NOT_FOUND_BY_STRUCTURE)) - set(NO_EXPERTS)))


def family_of(model_type: str) -> str:
    """Give the folder of a `model_type` in config.json: nllb-moe is in nllb_moe, inkling_mm_model in inkling."""
    from transformers.models.auto.configuration_auto import model_type_to_module_name

    return model_type_to_module_name(model_type)


def _routes(path: Path) -> bool:
    text = path.read_text(encoding="utf-8")
    return bool(INTERFACE.search(text) or ROUTER.search(text))
