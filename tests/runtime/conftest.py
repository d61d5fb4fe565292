"""Packed tiny models and the resident models that they are compared with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from foregate.collect import tiny_models
from foregate.collect.architectures import find_moe_modules, topology_of
from foregate.runtime.alignment import align_weights
from foregate.runtime.layers import layer_class
from foregate.runtime.pack import pack


@dataclass(frozen=True)
class Packed:
    """A tiny model, resident and as a store."""

    resident: Any
    """On grouped_mm where the family goes through the experts interface, with weights at multiples of 64 bytes.

    Small float32 products depend on where a matrix starts, and weights that are mapped from a file start anywhere,
    often at 56 modulo 64: only once both models are aligned are their logits equal bit for bit.
    """
    store: Path
    experts: int
    top_k: int

    @property
    def least(self) -> float:
        """The fewest experts that can be held, as `slots`; 1 would mean all of them."""
        return self.top_k if self.top_k > 1 else 1 / self.experts

    def inputs(self, *shape: int, seed: int = 0) -> dict[str, torch.Tensor]:
        """Give random tokens [batch, length] as keywords of a forward."""
        ids = torch.randint(4, 300, shape, generator=torch.Generator().manual_seed(seed))
        found = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if self.resident.config.is_encoder_decoder:
            found["decoder_input_ids"] = ids[:, : (shape[1] + 1) // 2]
        return found

    def prompts(self, *shape: int, seed: int = 0) -> dict[str, torch.Tensor]:
        """Give random tokens [batch, length] as keywords of generate."""
        found = self.inputs(*shape, seed=seed)
        found.pop("decoder_input_ids", None)
        return found


@pytest.fixture(scope="session")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Packed]:
    """Pack tiny models on demand, each once per session."""

    @cache
    def build(name: str, dtype: torch.dtype = torch.float32) -> Packed:
        folder = tmp_path_factory.mktemp(name)
        made = tiny_models.build(name).to(dtype)
        made.save_pretrained(folder / "model")
        pack(folder / "model", folder / "store")
        resident: Any = type(made).from_pretrained(folder / "model")  # some buffers stay in float32, unlike by `to`
        for item in find_moe_modules(resident):
            layer_class(item.kind).make_exact(resident.get_submodule(item.name))
        align_weights(resident)
        topology = topology_of(resident)
        return Packed(resident, folder / "store", topology.num_experts, topology.layers[0].top_k)

    return build
