"""A layer of experts that are modules of their own: each is computed by its own forward, with the slot's tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ...collect.kinds import kind_named
from .base import OffloadedLayer, Place


class DictionaryLayer(OffloadedLayer):
    """Keep the emptied dictionary and the first of its experts, which stands for all."""

    def __init__(self, place: Place, module: Any, shared: Any = None) -> None:
        super().__init__(place, module, shared)
        self.module: Any = module.emptied[0]
        self.form = kind_named(self.kind)
        self._expert = self.module.get_submodule("expert_0")

    @classmethod
    def joined(cls, module: Any, blocks: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """Name experts as the dictionary does."""
        form = kind_named(cls.kind)
        return {form.tensor_name(e, name): block[name] for e, block in enumerate(blocks) for name in block}

    def expert_rows(self, tensors: dict[str, torch.Tensor], x_MH: torch.Tensor) -> torch.Tensor:
        """Compute one expert on its rows [M, H]."""
        return torch.func.functional_call(self._expert, tensors, (x_MH,))
