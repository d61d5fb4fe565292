"""The option `--capacity`: numbers of experts and shares of them. Knows topologies, no commands."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..collect.errors import SettingError

if TYPE_CHECKING:
    from ..collect.topology import MoeTopology

NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)(e[+-]?[0-9]+)?( ?%)?", re.IGNORECASE)


def parse_capacities(texts: Sequence[str], topology: MoeTopology) -> list[int]:
    """Read capacities such as 0.25, 25%, 192 or several with commas, as numbers of experts without repetition.

    Raises:
        SettingError: if one is no capacity of these experts.
    """
    from ..runtime.simulation import num_slots

    found: dict[int, None] = {}
    for text in (part.strip() for part in ",".join(texts).split(",")):
        if not text:
            continue
        if not NUMBER.fullmatch(text):
            raise SettingError(f"capacity must be a number of experts or a share such as 0.25 or 25%, got {text!r}.")
        percent = text.endswith("%")
        value = float(text.rstrip("% ")) / (100 if percent else 1)
        whole = (percent or "." in text) and value == 1.0  # all experts, where a plain 1 is one expert
        if percent and value > 1:
            raise SettingError(f"capacity must be at most 100%, got {text!r}.")
        found[num_slots(topology.num_experts if whole else value, topology)] = None
    if not found:
        raise SettingError("capacity must be a number of experts or a share such as 0.25 or 25%, got nothing.")
    return list(found)
