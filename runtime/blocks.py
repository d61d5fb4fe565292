"""Layout of one expert block. Knows names, shapes and offsets; knows nothing of files, caches or models.

Block: one expert's tensors in one contiguous byte range, in the order of its experts module, each at a multiple of 64
bytes; the range itself is padded to a multiple of 4096, so that it can be read with O_DIRECT into a cache slot.
Example: gate_up_proj [96, 128] and down_proj [128, 48] in BF16 take 24,576 and 12,288 bytes: a block of 36,864 bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch

ALIGNMENT = 4096  # of blocks: the largest sector and page size that O_DIRECT asks for on common file systems
TENSOR_ALIGNMENT = 64  # of tensors inside a block: one cache line

DTYPE_BYTES = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
}
"""Dtypes by their safetensors names, with their sizes."""

TORCH_NAMES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}
assert set(TORCH_NAMES) == set(DTYPE_BYTES)


class TensorSpec(NamedTuple):
    """Place one tensor inside a block."""

    name: str
    """Its name in the experts module: gate_up_proj, wi.weight."""
    shape: tuple[int, ...]
    """Its shape for one expert."""
    dtype: str
    """Its safetensors dtype: BF16."""
    offset: int
    """Where it starts, in bytes from the start of the block; a multiple of 64."""
    nbytes: int
    """Its length in bytes."""


@dataclass(frozen=True)
class BlockLayout:
    """Place all tensors of one expert."""

    tensors: tuple[TensorSpec, ...]
    """In order of their offsets."""
    nbytes: int
    """Length of the block: its payload rounded up to 4096."""

    @property
    def payload_bytes(self) -> int:
        """Bytes of the tensors alone."""
        return sum(spec.nbytes for spec in self.tensors)

    @property
    def gaps(self) -> list[tuple[int, int]]:
        """Byte ranges (start, end) that belong to no tensor."""
        gaps, position = [], 0
        for spec in self.tensors:
            if spec.offset > position:
                gaps.append((position, spec.offset))
            position = spec.offset + spec.nbytes
        if self.nbytes > position:
            gaps.append((position, self.nbytes))
        return gaps

    def to_json(self) -> dict[str, Any]:
        """Give the layout as plain JSON values."""
        tensors = [
            {"name": spec.name, "shape": list(spec.shape), "dtype": spec.dtype, "offset": spec.offset}
            for spec in self.tensors
        ]
        return {"nbytes": self.nbytes, "tensors": tensors}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> BlockLayout:
        """Read what `to_json` gave; a value of another form raises KeyError, TypeError or ValueError."""
        specs = []
        for item in value["tensors"]:
            shape = tuple(int(size) for size in item["shape"])
            nbytes = math.prod(shape) * DTYPE_BYTES[item["dtype"]]
            specs.append(TensorSpec(str(item["name"]), shape, item["dtype"], int(item["offset"]), nbytes))
        layout = cls(tuple(specs), int(value["nbytes"]))
        end = 0
        for spec in layout.tensors:
            if spec.offset < end or spec.offset % TENSOR_ALIGNMENT:
                raise ValueError(f"tensor {spec.name} starts at {spec.offset}")
            end = spec.offset + spec.nbytes
        if layout.nbytes < end or layout.nbytes % ALIGNMENT:
            raise ValueError(f"a block of {layout.nbytes} bytes")
        return layout


def align(value: int, alignment: int = ALIGNMENT) -> int:
    """Round up to a multiple of `alignment`."""
    return -(-value // alignment) * alignment


def plan_layout(tensors: Iterable[tuple[str, tuple[int, ...], str]]) -> BlockLayout:
    """Place (name, shape, dtype) one after the other."""
    specs, position = [], 0
    for name, shape, dtype in tensors:
        position = align(position, TENSOR_ALIGNMENT)
        nbytes = math.prod(shape) * DTYPE_BYTES[dtype]
        specs.append(TensorSpec(name, tuple(shape), dtype, position, nbytes))
        position += nbytes
    return BlockLayout(tuple(specs), align(position))


def layout_of(tensors: Mapping[str, torch.Tensor]) -> BlockLayout:
    """Place one expert's tensors in the order given."""
    return plan_layout((name, tuple(tensor.shape), dtype_name(tensor.dtype)) for name, tensor in tensors.items())


def dtype_name(dtype: torch.dtype) -> str:
    """Name a torch dtype as safetensors does.

    Raises:
        ValueError: if safetensors, or this store, has no name for it.
    """
    plain = str(dtype).removeprefix("torch.")
    for name, torch_name in TORCH_NAMES.items():
        if torch_name == plain:
            return name
    raise ValueError(f"dtype must be one of {', '.join(TORCH_NAMES.values())}, got {plain}")


def views(buffer: memoryview | bytearray, layout: BlockLayout) -> dict[str, torch.Tensor]:
    """Show a writable block as tensors, by name, without a copy; they live as long as the buffer is valid."""
    import torch

    return {
        spec.name: torch.frombuffer(
            buffer, dtype=getattr(torch, TORCH_NAMES[spec.dtype]), count=math.prod(spec.shape), offset=spec.offset
        ).view(spec.shape)
        for spec in layout.tensors
    }


def fill(buffer: memoryview | bytearray, layout: BlockLayout, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write one expert's tensors into a block by name; the gaps are set to zero."""
    if set(tensors) != {spec.name for spec in layout.tensors}:
        raise ValueError(f"expected tensors {[spec.name for spec in layout.tensors]}, got {sorted(tensors)}")
    for start, end in layout.gaps:
        buffer[start:end] = bytes(end - start)
    for name, view in views(buffer, layout).items():
        tensor = tensors[name]
        if tensor.shape != view.shape or tensor.dtype != view.dtype:
            raise ValueError(
                f"{name} must be {view.dtype} {tuple(view.shape)}, got {tensor.dtype} {tuple(tensor.shape)}"
            )
        view.copy_(tensor)
