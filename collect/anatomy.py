"""Which parts of a model read text, and which of them run several times. Knows names and configs; no experts or traces.

A routing trace is of text. Towers for images and sound, and what makes speech, may have experts too; they are left as
they are, neither recorded nor offloaded. A looped block has one MoE layer for each of its passes.
"""

from __future__ import annotations

import re
from typing import Any

from torch import nn

OUTSIDE_TEXT = re.compile(r"vision|visual|image|video|audio|speech|talker|code2wav|^mtp|_mtp$")
FEED_FORWARD = re.compile(r"(?:MLP|Mlp|FeedForward|FFN|MoE|Moe|MoeBlock|MoEBlock|Experts?|DenseActDense)$")
ROUTER = re.compile(r"Router|Gate\b|Gating")
MOST_NAMES = 6  # of each sort in a message


def reads_text(name: str) -> bool:
    """Say whether a module's path lies in the part of a model that text passes."""
    return not any(OUTSIDE_TEXT.search(part) for part in name.split("."))


def text_model(model: nn.Module) -> Any:
    """Give what runs on text: the model itself, or its part that does, where the model has no forward of its own."""
    if type(model).forward is not nn.Module.forward:
        return model
    parts = [
        (name, part)
        for name, part in model.named_children()
        if reads_text(name) and type(part).forward is not nn.Module.forward
    ]
    return parts[0][1] if len(parts) == 1 else model


def passes_of(config: Any, block: int) -> int:
    """Give how often a forward runs a block; a loop covers the blocks from its start up to its end."""
    loop = _loop(config)
    return loop[2] if loop is not None and loop[0] <= block < loop[1] else 1


def _loop(config: Any) -> tuple[int, int, int] | None:
    names = ("loop_layer_index_start", "loop_layer_index_end", "loop_num_passes")
    values = [getattr(config, name, None) for name in names]
    return tuple(values) if all(isinstance(value, int) for value in values) else None  # type: ignore[return-value]


def describe_parts(model: nn.Module) -> str:
    """List in words what could be experts and routers, for a model that nothing was found in."""
    blocks, routers, lists = set(), set(), set()
    for name, module in model.named_modules():
        kind = type(module).__name__
        if ROUTER.search(kind):
            routers.add(kind)
        elif FEED_FORWARD.search(kind):
            blocks.add(kind)
        if isinstance(module, (nn.ModuleList, nn.ModuleDict)) and "expert" in name.rpartition(".")[2]:
            inner = next(iter(module.values() if isinstance(module, nn.ModuleDict) else module), None)
            lists.add(f"{len(module)} {type(inner).__name__} in {re.sub(r'[0-9]+', '*', name)}")
    found = {"feed-forward modules": blocks, "lists of experts": lists, "routers": routers}
    return "; ".join(f"{what}: {_few(sorted(names))}" for what, names in found.items())


def _few(names: list[str]) -> str:
    return ", ".join(names[:MOST_NAMES]) + (", .." if len(names) > MOST_NAMES else "") or "none"
