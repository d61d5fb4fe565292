"""The packed expert store, read-only. Knows files, offsets and checksums; knows nothing of slots, threads or models.

A store is a complete model folder: config.json, tokenizer, dense tensors, and beside them
  experts-00001.safetensors ..   one file per MoE layer: expert 0's block, expert 1's block, ..; standard safetensors,
                                 data from a multiple of 4096 on, padding as tensors of its own;
  foregate.json                  the manifest: model, layouts, files with sizes, checksums (blake2b, 128 bits).
Example: layer 2 of 32 experts with blocks of 36,864 bytes and a header of 8,192 bytes puts expert 5 at byte 192,512.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from ..collect.errors import ModelError, StoreError
from ..collect.topology import ExpertId, MoeTopology
from .blocks import BlockLayout
from .checkpoint import open_checkpoint, read_header
from .manifest import MANIFEST, Manifest


class Segment(NamedTuple):
    """One byte range of a file and where it lands in a block."""

    file: int
    """Index into the store's files."""
    offset: int
    """First byte in the file."""
    nbytes: int
    """Length."""
    block_offset: int
    """First byte in the block."""


class ExpertStore(Mapping[ExpertId, bytes]):
    """Map each expert to its block. Opened with `ExpertStore.open`; holds no file open."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path = path
        self.manifest = manifest
        self.files = [path / file.name for file in manifest.expert_files]

    @classmethod
    def open(cls, path: str | Path, *, trust_remote_code: bool = False) -> ExpertStore:
        """Open a store after checking manifest, file sizes, headers and the model's config; bytes are not read.

        Raises:
            StoreError: if it is no store, is truncated or altered, or its parts belong to different models.
        """
        path = Path(path)
        try:
            manifest = Manifest.from_json(json.loads((path / MANIFEST).read_text(encoding="utf-8")))
        except (FileNotFoundError, NotADirectoryError):
            raise StoreError(
                f"{path} is no expert store (no {MANIFEST}); give a folder that 'foregate pack' wrote."
            ) from None
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise StoreError(
                f"{path / MANIFEST} is no manifest of this version ({error}); pack the model again."
            ) from error
        store = cls(path, manifest)
        store._check_sizes()
        store._check_headers()
        try:
            fingerprint = open_checkpoint(path, trust_remote_code=trust_remote_code).fingerprint
        except ModelError as error:
            raise StoreError(f"{path} has no config that can be read ({error})") from error
        if fingerprint != manifest.fingerprint:
            raise StoreError(
                f"{path} belongs to another model: its config has fingerprint {fingerprint}, its experts were packed "
                f"for {manifest.fingerprint}; pack the model again."
            )
        return store

    @property
    def topology(self) -> MoeTopology:
        """MoE layers of the model."""
        return self.manifest.topology

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the model's config."""
        return self.manifest.fingerprint

    @property
    def module_names(self) -> list[str]:
        """Path of the experts module of each MoE layer."""
        return [layer.module for layer in self.manifest.layers]

    @property
    def kinds(self) -> list[str]:
        """Kind of the experts module of each MoE layer, as fused or switch."""
        return [layer.kind for layer in self.manifest.layers]

    @property
    def block_bytes(self) -> int:
        """Bytes of the largest block: what a slot must hold."""
        return max(layer.layout.nbytes for layer in self.manifest.layers)

    def layout(self, layer: int) -> BlockLayout:
        """Give the layout of a layer's blocks."""
        return self.manifest.layers[layer].layout

    def segments(self, flat: int) -> tuple[Segment, ...]:
        """List the file ranges that make up an expert's block, by flat index."""
        index, expert = self.topology.ids[flat]
        layer = self.manifest.layers[index]
        nbytes = layer.layout.nbytes
        return (Segment(layer.file, layer.offset + expert * nbytes, nbytes, 0),)

    def checksum(self, flat: int) -> str:
        """Give the checksum of an expert's block, by flat index."""
        index, expert = self.topology.ids[flat]
        return self.manifest.layers[index].checksums[expert]

    def verify_expert(self, flat: int, buffer: memoryview | bytes) -> bool:
        """Say whether a buffer starts with that expert's block, byte for byte."""
        nbytes = self.layout(self.topology.ids[flat].layer).nbytes
        return len(buffer) >= nbytes and checksum_of(memoryview(buffer)[:nbytes]) == self.checksum(flat)

    def damaged_dense_files(self) -> list[Path]:
        """Read the dense files and list those whose bytes are not the ones that were packed."""
        damaged = []
        for file in self.manifest.dense_files:
            if file_checksum(self.path / file.name) != file.checksum:
                damaged.append(self.path / file.name)
        return damaged

    def check_dense_files(self, loaded: Iterable[str | Path]) -> None:
        """Compare the files that a model's dense tensors are loaded from with those that were packed, byte for byte.

        Raises:
            StoreError: if they are others or were altered; a renamed tensor would else be loaded as random numbers.
        """
        names = sorted(Path(path).name for path in loaded)
        packed = sorted(file.name for file in self.manifest.dense_files)
        if names != packed:
            raise StoreError(
                f"{self.path} was altered: its dense tensors would be loaded from {', '.join(names)}, the manifest "
                f"says {', '.join(packed)}; pack the model again."
            )
        for path in self.damaged_dense_files():
            raise StoreError(f"{path} was altered: it does not match its checksum; copy it or pack the model again.")

    def __getitem__(self, expert: ExpertId) -> bytes:
        if not 0 <= expert[0] < self.topology.num_layers or not (
            0 <= expert[1] < self.topology.layers[expert[0]].num_experts
        ):
            raise KeyError(expert)
        block = bytearray(self.layout(expert[0]).nbytes)
        for segment in self.segments(self.topology.flat(*expert)):
            with open(self.files[segment.file], "rb") as file:
                file.seek(segment.offset)
                part = file.read(segment.nbytes)
            if len(part) != segment.nbytes:
                raise StoreError(f"{self.files[segment.file]} was truncated after it was opened; pack the model again.")
            block[segment.block_offset : segment.block_offset + segment.nbytes] = part
        return bytes(block)

    def __iter__(self) -> Iterator[ExpertId]:
        return iter(self.topology.ids)

    def __len__(self) -> int:
        return self.topology.num_experts

    def _check_sizes(self) -> None:
        for file in (*self.manifest.expert_files, *self.manifest.dense_files):
            path = self.path / file.name
            size = path.stat().st_size if path.is_file() else None
            if size != file.nbytes:
                state = "is missing" if size is None else f"has {size} bytes"
                raise StoreError(
                    f"{path} {state}, the manifest says {file.nbytes} bytes; the store is incomplete or was altered, "
                    "pack the model again."
                )

    def _check_headers(self) -> None:
        """Compare the files' own headers with the manifest: a byte must mean the same to both."""
        headers = {}
        for index, path in enumerate(self.files):
            try:
                headers[index] = read_header(path)
            except ModelError as error:
                raise StoreError(f"{path} is damaged ({error})") from error
        for layer in self.manifest.layers:
            header = headers.get(layer.file, {})
            for expert in range(len(layer.checksums)):
                block = layer.offset + expert * layer.layout.nbytes
                for spec in layer.layout.tensors:
                    name = layer.tensor_name(expert, spec.name)
                    found = header.get(name)
                    start = block + spec.offset
                    if found != (spec.dtype, spec.shape, start, start + spec.nbytes):
                        raise StoreError(
                            f"{self.path} was altered: tensor {name} is not where its manifest says (byte {start} of "
                            f"file {layer.file}); pack the model again."
                        )


def checksum_of(block: memoryview | bytes | bytearray) -> str:
    """Give the blake2b-128 of some bytes in hexadecimal."""
    return hashlib.blake2b(block, digest_size=16).hexdigest()


def file_checksum(path: Path) -> str:
    """Give the blake2b-128 of a whole file in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
