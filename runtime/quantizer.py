"""The seam into transformers: with `quant_method: foregate` in config.json a model is built without its experts.

transformers calls the quantizer before weights are loaded (the experts modules lose their parameters, so that nothing
is read for them) and after (the model gets slots, engine and predictor as `model.foregate`). Registered on import,
which `registration` sees to.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from ..collect.architectures import find_moe_modules
from ..collect.errors import SettingError
from .alignment import align_weights
from .blocks import TORCH_NAMES
from .config import RuntimeConfig
from .handle import Foregate
from .layers import layer_class
from .store import ExpertStore

METHOD = "foregate"
_pending: ContextVar[RuntimeConfig | None] = ContextVar("foregate_runtime_config", default=None)


@contextmanager
def runtime_settings(config: RuntimeConfig) -> Iterator[None]:
    """Use these settings for every from_pretrained of a store inside the block; without it the defaults hold."""
    token = _pending.set(config)
    try:
        yield
    finally:
        _pending.reset(token)


@register_quantization_config(METHOD)
class ForegateConfig(QuantizationConfigMixin):
    """Mark a folder as an expert store; it has no settings of its own."""

    def __init__(self, **kwargs: Any) -> None:
        self.quant_method = METHOD  # type: ignore[assignment]


@register_quantizer(METHOD)
class ForegateQuantizer(HfQuantizer):
    """Build a model whose experts stay in the store."""

    def __init__(self, quantization_config: QuantizationConfigMixin, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self._path: Path | None = None

    def _process_model_before_weight_loading(self, model: nn.Module, **kwargs: Any) -> None:
        files = kwargs.get("checkpoint_files") or []
        if not files:
            raise SettingError("A foregate store is loaded from its folder; got a model without checkpoint files.")
        self._path = Path(files[0]).parent
        store = ExpertStore.open(self._path, trust_remote_code=model.is_custom_code())  # type: ignore[operator]
        store.check_dense_files(files)
        for item in find_moe_modules(model):
            if item.call:
                continue  # emptied at the module's first call
            path, _, name = item.name.rpartition(".")
            parent: Any = model.get_submodule(path)
            module = model.get_submodule(item.name)
            left = layer_class(item.kind).empty(module)
            if left is not module:
                setattr(parent, name, left)
            parent._is_hf_initialized = True  # its initialisation may reach into the experts
        names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        ties: dict[str, str] = model.all_tied_weights_keys  # type: ignore[assignment]
        for target in [target for target, source in ties.items() if not {target, source} <= names]:
            del ties[target]

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        assert self._path is not None
        tensors = [*model.named_parameters(), *model.named_buffers()]
        unfilled = [name for name, value in tensors if value.device.type == "meta"]
        if unfilled:
            raise SettingError(f"{self._path} has no weights for {unfilled[0]}; pack the model again.")
        store = ExpertStore.open(self._path, trust_remote_code=model.is_custom_code())
        own = TORCH_NAMES[store.layout(0).tensors[0].dtype]
        if getattr(torch, own) != model.dtype:
            raise SettingError(f"dtype must be {own}, the store's own, got {model.dtype}; leave dtype out.")
        align_weights(model)
        model.foregate = Foregate(model, store, _pending.get() or RuntimeConfig())
        return model

    def is_serializable(self) -> bool:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Say no: the experts are not in the model; copy the store's folder instead."""
        return False

    @property
    def is_trainable(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride, reportIncompatibleMethodOverride]
        """Say no: the experts are read-only."""
        return False
