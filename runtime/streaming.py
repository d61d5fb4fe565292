"""Reading a checkpoint one MoE layer at a time, through transformers' own loader. Knows modules; writes nothing.

transformers converts any layout on disk to the layout in memory. It offers each finished parameter to a quantizer; the
one registered here hands experts to a callback, layer by layer, and leaves an empty parameter behind. So memory holds
the dense part and about one MoE layer.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import PreTrainedModel
from transformers.core_model_loading import ConversionOps
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from ..collect.architectures import MoeModule, find_moe_modules
from ..collect.errors import ModelError
from ..collect.kinds import kind_named
from .checkpoint import Checkpoint

log = logging.getLogger(__name__)

METHOD = "foregate_streaming"  # known to this process only, never written to a config

Layer = dict[str, torch.Tensor]
"""One MoE layer's experts by parameter name, in the module's order: gate_up_proj [E, 2I, H] or expert_3.wi.weight."""


def expert_parameters(module: nn.Module, item: MoeModule) -> Iterator[tuple[str, nn.Parameter]]:
    """List the parameters of an experts module that belong to single experts, by their name in it."""
    yield from kind_named(item.kind).stored(module).items()


def dense_state(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Give the tensors of a streamed model that are not experts, by name."""
    routed = {
        f"{item.name}.{name}"
        for item in find_moe_modules(model)
        for name, _ in expert_parameters(model.get_submodule(item.name), item)
    }
    return {name: tensor for name, tensor in model.state_dict().items() if name not in routed}


def stream(checkpoint: Checkpoint, on_layer: Callable[[int, MoeModule, Layer], None]) -> PreTrainedModel:
    """Load the dense part of a model and hand over each MoE layer's experts as soon as all of them were read.

    Args:
        checkpoint: plain weights, in any layout and dtype that transformers reads.
        on_layer: called once per MoE layer with its index, place and experts; the tensors are its own.

    Raises:
        ModelError: if the model has no MoE layers, is quantized, or the checkpoint lacks tensors.
    """
    if checkpoint.quant_method is not None:
        raise ModelError(
            f"{checkpoint.folder} is quantized with {checkpoint.quant_method}; give a checkpoint with plain weights."
        )
    collector = _Collector(on_layer, find_moe_modules(checkpoint.skeleton()))
    try:
        model, info = checkpoint.model_class.from_pretrained(
            checkpoint.folder,
            config=checkpoint.config,
            dtype="auto",
            quantization_config=_StreamingConfig(collector),  # type: ignore[arg-type]
            output_loading_info=True,
            local_files_only=True,
            use_safetensors=None,
            trust_remote_code=checkpoint.trust_remote_code,
        )
    except _Stopped as stopped:
        raise stopped.error from None
    except (RuntimeError, ValueError, OSError, SafetensorError) as error:
        reason = " ".join(str(error).split())[:300]
        raise ModelError(f"{checkpoint.folder} could not be loaded ({reason}).") from error
    missing = sorted({*info["missing_keys"], *collector.missing()})
    if missing:
        raise ModelError(
            f"{checkpoint.folder} lacks {len(missing)} tensors of its model, {missing[0]} among them; "
            "fetch or save the checkpoint again."
        )
    del model.hf_quantizer
    model.config.__dict__.pop("quantization_config", None)
    gc.collect()  # loader and model refer to each other
    return model


class _Collector:
    """Gather experts until a layer is whole."""

    def __init__(self, on_layer: Callable[[int, MoeModule, Layer], None], modules: list[MoeModule]) -> None:
        self.on_layer, self.modules = on_layer, modules  # of a whole model: the loader's ties none until it is done
        self.places: dict[str, tuple[int, str, torch.Size]] = {}  # full name -> layer, name in its module, shape
        self.wanted: list[list[str]] = []
        self.layers: dict[int, Layer] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> _Collector:
        return self  # transformers copies configs, and with them the quantization config that holds it

    def inspect(self, model: nn.Module) -> None:
        for index, item in enumerate(self.modules):
            names = []
            for name, parameter in expert_parameters(model.get_submodule(item.name), item):
                # a tied module's experts may come under either name; a loop has one module for several layers
                self.places.setdefault(f"{item.name}.{name}", (item.home, name, parameter.shape))
                names.append(name)
            self.wanted.append(names if item.home == index else [])

    def add(self, full_name: str, tensor: torch.Tensor) -> None:
        index, name, shape = self.places[full_name]
        if tensor.shape != shape:
            raise ModelError(
                f"Tensor {full_name} must be {tuple(shape)} by the model's config, the checkpoint has "
                f"{tuple(tensor.shape)}; config and weights belong to different models."
            )
        order = self.wanted[index]
        if not order:
            return  # a tied parameter that was handed over under its other name
        layer = self.layers.setdefault(index, {})
        layer[name] = tensor
        if len(layer) == len(order):
            self.wanted[index] = []
            self.on_layer(index, self.modules[index], {key: self.layers[index].pop(key) for key in order})
            del self.layers[index]

    def missing(self) -> list[str]:
        return [
            f"{self.modules[index].name}.{name}"
            for index, names in enumerate(self.wanted)
            for name in names
            if name not in self.layers.get(index, ())
        ]


@register_quantization_config(METHOD)
class _StreamingConfig(QuantizationConfigMixin):
    def __init__(self, collector: _Collector) -> None:
        self.quant_method = METHOD  # type: ignore[assignment]
        self.collector = collector


@register_quantizer(METHOD)
class _StreamingQuantizer(HfQuantizer):
    """Take experts' parameters out of the loader's hands."""

    def __init__(self, quantization_config: Any, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self.collector: _Collector = quantization_config.collector

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        self.collector.inspect(model)
        return model

    def param_needs_quantization(self, model: Any, param_name: str, **kwargs: Any) -> bool:
        return param_name in self.collector.places

    def get_quantize_ops(self) -> ConversionOps:
        return _HandOver(self.collector)

    def is_serializable(self) -> bool:  # type: ignore[override]
        return False

    @property
    def is_trainable(self) -> bool:  # type: ignore[override]
        return False


class _HandOver(ConversionOps):
    def __init__(self, collector: _Collector) -> None:
        self.collector = collector

    @torch.no_grad()
    def convert(self, input_dict: dict[str, Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
        left = {}
        for name in list(input_dict):
            value = input_dict.pop(name)
            if name not in self.collector.places:
                left[name] = value  # dense, from the same tensors on disk
                continue
            tensor = value[0] if isinstance(value, list) else value
            left[name] = torch.empty(0, dtype=tensor.dtype)
            try:
                self.collector.add(name, tensor)
            except Exception as error:
                raise _Stopped(error) from error
        return left


class _Stopped(BaseException):
    """Carry an error through the loader, which would note any Exception and go on reading."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error
