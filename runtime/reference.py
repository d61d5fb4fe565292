"""The resident model that an offloaded one is compared with: plain transformers, all experts in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import GenerationConfig, PreTrainedModel

from ..collect.architectures import expert_tensors, find_moe_modules
from ..collect.errors import ModelError, StoreError
from ..collect.kinds import kind_named
from .alignment import align_weights
from .blocks import TORCH_NAMES, layout_of, views
from .checkpoint import Checkpoint, open_checkpoint
from .config import available_bytes
from .layers import layer_class
from .store import ExpertStore

HEADROOM = 1.1  # over the weights: activations and the loader's own copies of a few tensors


def open_reference(store: ExpertStore, reference: str | Path | None, *, trust_remote_code: bool) -> PreTrainedModel:
    """Load the resident model of a store: from the checkpoint given, or from the store's own bytes.

    Raises:
        ModelError: if the checkpoint is of another model, or the memory does not hold the resident model.
    """
    needed = sum(file.nbytes for file in (*store.manifest.expert_files, *store.manifest.dense_files))
    available = available_bytes()
    if needed * HEADROOM > available:
        raise ModelError(
            f"The resident model needs {needed * HEADROOM / 2**30:.2f} GiB and {available / 2**30:.2f} GiB are free; "
            "run the comparison on a machine that holds it."
        )
    if reference is None:
        model = resident_from_store(store, trust_remote_code=trust_remote_code)
    else:
        checkpoint = open_checkpoint(reference, trust_remote_code=trust_remote_code)
        if checkpoint.fingerprint != store.fingerprint:
            raise ModelError(
                f"{reference} is another model than the one packed in {store.path}: config fingerprints "
                f"{checkpoint.fingerprint} and {store.fingerprint}; give the checkpoint that was packed."
            )
        model = _load(checkpoint)
        first = find_moe_modules(model)[0]
        layout = layout_of(expert_tensors(model.get_submodule(first.name), first.kind, 0))
        if layout != store.layout(0):
            raise ModelError(
                f"{reference} has experts of {layout.payload_bytes} bytes, {store.path} of "
                f"{store.layout(0).payload_bytes}; give the checkpoint that was packed, inflated in the same way."
            )
    for item in find_moe_modules(model):
        layer_class(item.kind).make_exact(model.get_submodule(item.name))
    align_weights(model)
    return model


def resident_from_store(store: ExpertStore, *, trust_remote_code: bool = False) -> PreTrainedModel:
    """Build the plain model from a store alone, its experts filled by name.

    Raises:
        StoreError: if the store lacks tensors of its model.
    """
    checkpoint = open_checkpoint(store.path, trust_remote_code=trust_remote_code)
    config = type(checkpoint.config).from_dict(checkpoint.config.to_dict())
    config.__dict__.pop("quantization_config", None)
    state: dict[str, torch.Tensor] = {}
    for file in store.manifest.dense_files:
        state.update(load_file(store.path / file.name))
    skeleton = checkpoint.skeleton()
    for index, layer in enumerate(store.manifest.layers):
        if layer.module in store.module_names[:index]:
            continue  # a loop's next pass
        kind, count = kind_named(layer.kind), len(layer.checksums)
        dtype = getattr(torch, TORCH_NAMES[layer.layout.tensors[0].dtype])
        stored = kind.stored(skeleton.get_submodule(layer.module))
        # zeros, since some families have rows that belong to no expert and are never read
        tensors = {name: torch.zeros(parameter.shape, dtype=dtype) for name, parameter in stored.items()}
        for expert in range(count):
            block = bytearray(store[store.topology.ids[store.topology.flat(index, expert)]])
            found = views(block, layer.layout)
            for name, view in kind.expert(tensors, expert, count).items():
                view.copy_(found[name])
        state.update({f"{layer.module}.{name}": tensor for name, tensor in tensors.items()})
    loaded: Any = checkpoint.model_class.from_pretrained(
        None, config=config, state_dict=state, dtype="auto", output_loading_info=True
    )
    model, info = loaded
    if info["missing_keys"]:
        raise StoreError(
            f"{store.path} lacks {len(info['missing_keys'])} tensors of its model, {sorted(info['missing_keys'])[0]} "
            "among them; pack the model again."
        )
    if (store.path / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(store.path)
    return model


def _load(checkpoint: Checkpoint) -> PreTrainedModel:
    try:
        return checkpoint.model_class.from_pretrained(
            checkpoint.folder, dtype="auto", local_files_only=True, trust_remote_code=checkpoint.trust_remote_code
        )
    except (RuntimeError, ValueError, OSError, SafetensorError) as error:
        reason = " ".join(str(error).split())[:300]
        raise ModelError(f"{checkpoint.folder} could not be loaded ({reason}).") from error
