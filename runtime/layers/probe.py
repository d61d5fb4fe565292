"""Probing a layer class, when a model is loaded, against the module that it stands for, which transformers may change.

The module is given two random experts (or one for all, where its router chooses), and its forward and the layer's must
give the same bits. So a new version of transformers that computes a family otherwise is an error, not another result.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from torch import nn

from ...collect.errors import ModelError
from ..blocks import BlockLayout
from ..kernels import random_block

log = logging.getLogger(__name__)

TOKENS = (1, 5)


def check_layer(form: Any, module: Any, layout: BlockLayout, shared: Any) -> None:
    """Compare a layer class with the module that `empty` replaced.

    Args:
        form: the layer class.
        module: the stand-in, whose dense parts are loaded.
        shared: what `choose` gave.

    Raises:
        ModelError: if their results differ in a bit, or the module cannot be called as this layer is.
    """
    generator = torch.Generator().manual_seed(0)
    blocks = [random_block(layout, generator) for _ in range(form.PROBED)]
    loaded = {name: value.detach() for name, value in module.named_parameters(recurse=False)}
    twin = graft(module.emptied[0], {**loaded, **form.joined(module, blocks)})
    layer = form(_place(layout, blocks), module, shared)
    try:
        with torch.no_grad():
            for tokens in TOKENS:
                args = form.probe(module, blocks[0], tokens, generator)
                if args is None:
                    log.warning(
                        "%s experts are not compared with their module: the layer class has no probe", form.kind
                    )
                    return
                if not _equal(twin(*args), layer.forward(*args)):
                    raise ModelError(_message(form, module, "gives other results than"))
    except (TypeError, RuntimeError, AttributeError, LookupError) as error:
        raise ModelError(_message(form, module, f"cannot be compared ({error}) with")) from error


def graft(module: nn.Module, tensors: Mapping[str, torch.Tensor]) -> nn.Module:
    """Copy a module with these parameters, by dotted name, in place of its own; nothing else is copied."""
    twin = copy.copy(module)
    twin._parameters, twin._modules = dict(module._parameters), dict(module._modules)
    parts: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        head, _, rest = name.partition(".")
        if rest:
            parts.setdefault(head, {})[rest] = tensor
        else:
            twin._parameters[head] = nn.Parameter(tensor, requires_grad=False)
    for head, inner in parts.items():
        twin._modules[head] = graft(module.get_submodule(head), inner)
    return twin


def random_rows(tokens: int, width: int, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Give hidden states [T, width]."""
    return torch.randn(tokens, width, generator=generator).to(dtype)


def _place(layout: BlockLayout, blocks: Sequence[dict[str, torch.Tensor]]) -> Any:
    """Serve experts from blocks in memory, the last first; where there is one block, every expert has it."""

    @contextmanager
    def acquire(layer: int, needed: Sequence[int], **_: Any) -> Iterator[Iterator[tuple[int, int]]]:
        yield ((expert, min(expert, len(blocks) - 1)) for expert in reversed(needed))

    engine = SimpleNamespace(topology=SimpleNamespace(offsets=[0]), acquire=acquire)
    arena = SimpleNamespace(tensors=lambda slot, _: blocks[slot])
    return 0, engine, arena, layout, SimpleNamespace(routed=lambda layer, ids: None)


def _equal(left: Any, right: Any) -> bool:
    pairs = zip(left, right, strict=True) if isinstance(left, tuple) else [(left, right)]
    return all(torch.equal(one, other) for one, other in pairs)


def _message(form: Any, module: Any, what: str) -> str:
    return (
        f"{type(module.emptied[0]).__name__} of transformers {transformers.__version__} {what} foregate's own "
        f"computation of {form.kind} experts; use a version of transformers that foregate was tried with."
    )
