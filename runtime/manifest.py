"""What `foregate.json` of a packed store says: model, layouts, files, checksums. Knows JSON; opens no file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..collect.topology import MoeTopology
from .blocks import ALIGNMENT, BlockLayout

MANIFEST = "foregate.json"
FORMAT, VERSION = "foregate-store", 1


@dataclass(frozen=True, kw_only=True)
class StoredFile:
    """Name a file of the store with its size and, for dense tensors, its checksum."""

    name: str
    nbytes: int
    checksum: str | None = None

    def __post_init__(self) -> None:
        name: object = self.name  # comes from JSON
        if not isinstance(name, str) or name in ("", ".", "..") or set(name) & set("/\\:\0"):
            raise ValueError(f"{name!r} is no name of a file in the folder")


@dataclass(frozen=True, kw_only=True)
class StoredLayer:
    """Place one MoE layer's blocks: in one file, one after the other."""

    module: str
    """Path of its experts module in the model."""
    kind: str
    """How the experts module is laid out: a key of `collect.kinds.KINDS`."""
    file: int
    """Index into the expert files."""
    offset: int
    """Byte of the file where expert 0's block starts."""
    layout: BlockLayout
    """Layout of one expert's block."""
    checksums: tuple[str, ...]
    """blake2b-128 of each expert's block, in hexadecimal."""
    home: str = ""
    """Experts module that the tensors are named after, where that is another one: experts that modules share."""

    def tensor_name(self, expert: int, name: str) -> str:
        """Name an expert's tensor in the file, as the model names it where it has a name for it."""
        from ..collect.kinds import kind_named  # brings torch

        return f"{self.home or self.module}.{kind_named(self.kind).tensor_name(expert, name)}"


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What `foregate.json` says."""

    fingerprint: str
    """Fingerprint of the model's config."""
    topology: MoeTopology
    """MoE layers of the model."""
    layers: tuple[StoredLayer, ...]
    """Where each MoE layer's blocks are."""
    expert_files: tuple[StoredFile, ...]
    """Files with blocks."""
    dense_files: tuple[StoredFile, ...]
    """Files with the other tensors."""
    versions: dict[str, str]
    """Versions of the libraries that wrote it."""

    def to_json(self) -> dict[str, Any]:
        """Give the manifest as plain JSON values."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "fingerprint": self.fingerprint,
            "topology": self.topology.to_json(),
            "codec": None,
            "alignment": ALIGNMENT,
            "checksum": "blake2b-128",
            "layers": [
                {
                    "module": layer.module,
                    "kind": layer.kind,
                    "file": layer.file,
                    "offset": layer.offset,
                    "layout": layer.layout.to_json(),
                    "checksums": list(layer.checksums),
                    **({"home": layer.home} if layer.home else {}),
                }
                for layer in self.layers
            ],
            "expert_files": [{"name": file.name, "nbytes": file.nbytes} for file in self.expert_files],
            "dense_files": [vars(file) for file in self.dense_files],
            "versions": self.versions,
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Manifest:
        """Read what `to_json` gave; a value of another form raises KeyError, TypeError or ValueError."""
        if value.get("format") != FORMAT or value.get("version") != VERSION or value.get("codec") is not None:
            raise ValueError(f"format {value.get('format')} {value.get('version')}, codec {value.get('codec')}")
        layers = tuple(
            StoredLayer(
                module=str(item["module"]),
                kind=str(item["kind"]),
                file=int(item["file"]),
                offset=int(item["offset"]),
                layout=BlockLayout.from_json(item["layout"]),
                checksums=tuple(map(str, item["checksums"])),
                home=str(item.get("home", "")),
            )
            for item in value["layers"]
        )
        topology = MoeTopology.from_json(value["topology"])
        if [len(layer.checksums) for layer in layers] != [layer.num_experts for layer in topology.layers]:
            raise ValueError("checksums and topology differ in the number of experts")
        dense_files = tuple(StoredFile(**item) for item in value["dense_files"])
        if not dense_files:
            raise ValueError("no dense files")
        return cls(
            fingerprint=str(value["fingerprint"]),
            topology=topology,
            layers=layers,
            expert_files=tuple(StoredFile(**item) for item in value["expert_files"]),
            dense_files=dense_files,
            versions=dict(value["versions"]),
        )
