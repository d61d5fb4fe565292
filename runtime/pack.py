"""Packing a checkpoint into a store. Knows checkpoints and files; knows nothing of running models.

The result is a model folder that `from_pretrained` accepts: its config names the quantization method `foregate`, its
`model.safetensors` holds the dense tensors, each `experts-*.safetensors` one MoE layer's blocks.
"""

from __future__ import annotations

import importlib.metadata
import json
import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from ..collect.architectures import MoeModule, find_moe_modules, topology_of
from ..collect.errors import StoreError
from ..collect.kinds import kind_named
from ..collect.staging import staged_folder
from .blocks import ALIGNMENT, align, fill, layout_of
from .checkpoint import open_checkpoint
from .manifest import MANIFEST, Manifest, StoredFile, StoredLayer
from .store import ExpertStore, checksum_of, file_checksum
from .streaming import Layer, dense_state, stream

log = logging.getLogger(__name__)

QUANT_METHOD = "foregate"
MARGIN_BYTES = 16 << 20  # config, tokenizer, headers


def pack(model: str | Path, out: str | Path, *, trust_remote_code: bool = False) -> ExpertStore:
    """Pack a model into a new folder and open it; memory holds the dense part and about one MoE layer.

    Args:
        model: folder, packaged mini model or hub name of plain weights; tensors keep their dtype.
        out: folder that does not exist yet; it appears when it is complete.
        trust_remote_code: run the model code that the checkpoint brings.

    Raises:
        ModelError: if there are no MoE layers, or the checkpoint is damaged or quantized.
        SettingError: if `out` exists.
        StoreError: if the disk is too small.
    """
    checkpoint = open_checkpoint(model, trust_remote_code=trust_remote_code)
    if checkpoint.quant_method == QUANT_METHOD:
        raise StoreError(f"{checkpoint.folder} is a packed store already; give the checkpoint it was made from.")
    skeleton = checkpoint.skeleton()
    with staged_folder(out, checkpoint.weight_bytes() + _padding_bytes(skeleton) + MARGIN_BYTES) as folder:
        writer = _LayerWriter(folder, skeleton)
        loaded = stream(checkpoint, writer.add)
        loaded.config.quantization_config = {"quant_method": QUANT_METHOD}
        checkpoint.save(loaded, dense_state(loaded), folder)
        topology = topology_of(checkpoint.skeleton(loaded.dtype))
        manifest = Manifest(
            fingerprint=checkpoint.fingerprint,
            topology=replace(topology, expert_bytes=writer.layers[0].layout.payload_bytes),
            layers=writer.all_layers(),
            expert_files=tuple(_stored(folder / _file_name(number)) for number in range(len(writer.files))),
            dense_files=tuple(_stored(path, file_checksum(path)) for path in sorted(folder.glob("model*.safetensors"))),
            versions={name: importlib.metadata.version(name) for name in ("foregate", "torch", "transformers")},
        )
        (folder / MANIFEST).write_text(json.dumps(manifest.to_json(), indent=1) + "\n", encoding="utf-8")
        ExpertStore.open(folder, trust_remote_code=trust_remote_code)  # what does not open is not kept
    log.info("packed %d experts of %s into %s", topology.num_experts, checkpoint.folder, out)
    return ExpertStore.open(out, trust_remote_code=trust_remote_code)


class _LayerWriter:
    """Write the experts of each MoE layer to a file of their own; layers that share experts share the file."""

    def __init__(self, folder: Path, skeleton: PreTrainedModel) -> None:
        self.folder = folder
        self.modules = find_moe_modules(skeleton)
        homes = sorted({item.home for item in self.modules})
        self.files = {home: number for number, home in enumerate(homes)}
        self.layers: dict[int, StoredLayer] = {}

    def all_layers(self) -> tuple[StoredLayer, ...]:
        """Give the places of all layers, once their experts were added."""
        places = []
        for item in self.modules:
            home = self.layers[item.home]
            other = item.name != home.module
            places.append(replace(home, module=item.name, home=home.module if other else ""))
        return tuple(places)

    def add(self, index: int, item: MoeModule, tensors: Layer) -> None:
        kind, count = kind_named(item.kind), item.layer.num_experts
        experts = [kind.expert(tensors, expert, count) for expert in range(count)]
        layout = layout_of(experts[0])
        place = StoredLayer(
            module=item.name,
            kind=item.kind,
            file=self.files[index],
            offset=0,
            layout=layout,
            checksums=("",) * len(experts),
        )
        header = _header(place)
        checksums = []
        block = bytearray(layout.nbytes)
        with open(self.folder / _file_name(place.file), "wb") as file:
            file.write(header)
            for expert in experts:
                fill(block, layout, expert)
                checksums.append(checksum_of(block))
                file.write(block)
            file.flush()
            os.fsync(file.fileno())  # also, O_DIRECT reads would first wait for pages that are not on the disk yet
        self.layers[index] = replace(place, offset=len(header), checksums=tuple(checksums))


def _file_name(number: int) -> str:
    return f"experts-{number + 1:05d}.safetensors"


def _header(place: StoredLayer) -> bytes:
    """Describe a layer's file; gaps become tensors, since safetensors refuses holes, and spaces align the data."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    layout = place.layout
    for expert in range(len(place.checksums)):
        start = expert * layout.nbytes
        for spec in layout.tensors:
            offsets = [start + spec.offset, start + spec.offset + spec.nbytes]
            name = place.tensor_name(expert, spec.name)
            entries[name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": offsets}
        for number, (begin, end) in enumerate(layout.gaps):
            offsets = [start + begin, start + end]
            entries[f"padding.{expert}.{number}"] = {"dtype": "U8", "shape": [end - begin], "data_offsets": offsets}
    text = json.dumps(entries, separators=(",", ":")).encode()
    length = align(8 + len(text)) - 8
    return length.to_bytes(8, "little") + text.ljust(length)


def _stored(path: Path, checksum: str | None = None) -> StoredFile:
    return StoredFile(name=path.name, nbytes=path.stat().st_size, checksum=checksum)


def _padding_bytes(skeleton: PreTrainedModel) -> int:
    """Bound what alignment and headers add: one page per expert for each, and the header's entries."""
    return sum(item.layer.num_experts * 2 * ALIGNMENT for item in find_moe_modules(skeleton))
