"""Blocks of made-up experts in one file, for engines that replay recorded routing. Knows bytes and geometry; no traces.

An expert is a gated feed-forward part in float32, [2I, H] and [H, I], with I = 4/3 H or so, in a block of the size
asked for. Its numbers are drawn once per file; what they are changes no time.
"""

from __future__ import annotations

import math
import mmap
import shutil
from pathlib import Path

import torch

from ...collect.errors import SettingError
from ...collect.topology import MoeTopology
from ..blocks import ALIGNMENT, BlockLayout, TensorSpec
from ..store import Segment

HEADROOM = 1.1  # of the file's size that the disk must have left


class ReplayBlocks:
    """Map every expert of a topology to a block of a file; `write` makes the file.

    Raises:
        SettingError: if a block holds no expert of at least 64 hidden units.
    """

    def __init__(self, path: Path, topology: MoeTopology, block_bytes: int) -> None:
        hidden = 64 * int(math.sqrt(block_bytes / 4 / 3 / (4 / 3)) / 64)  # 3 H I floats
        if hidden < 64:
            raise SettingError(f"block_mib must hold an expert of 64 hidden units, got {block_bytes / 2**20:g}.")
        self.files, self.topology, self.hidden = [path], topology, hidden
        self.inner = block_bytes // (12 * hidden)
        self.block_bytes = -(-block_bytes // ALIGNMENT) * ALIGNMENT
        up, down = (2 * self.inner, hidden), (hidden, self.inner)
        size = 4 * math.prod(up)
        self.layout = BlockLayout(
            (
                TensorSpec("gate_up_proj", up, "F32", 0, size),
                TensorSpec("down_proj", down, "F32", size, 4 * math.prod(down)),
            ),
            self.block_bytes,
        )

    @property
    def nbytes(self) -> int:
        """Bytes of the file."""
        return self.topology.num_experts * self.block_bytes

    def segments(self, expert: int) -> tuple[Segment, ...]:
        """Give where an expert's block lies."""
        return (Segment(0, expert * self.block_bytes, self.block_bytes, 0),)

    def write(self) -> None:
        """Write the file, all blocks drawn anew.

        Raises:
            SettingError: if the disk has no room for it.
        """
        (path,) = self.files
        free = shutil.disk_usage(path.parent).free
        if free < HEADROOM * self.nbytes:
            raise SettingError(
                f"{path.parent} has {free / 2**30:.1f} GiB left and the experts take {self.nbytes / 2**30:.1f}; give "
                "another folder, or smaller blocks."
            )
        generator = torch.Generator().manual_seed(0)
        block = mmap.mmap(-1, self.block_bytes)
        values = torch.frombuffer(block, dtype=torch.float32)
        with path.open("wb") as file:
            for _ in range(self.topology.num_experts):
                values.copy_(torch.randn(1024, generator=generator).repeat(-(-len(values) // 1024))[: len(values)])
                values.mul_(1.0 / math.sqrt(self.hidden))
                file.write(block)
            file.flush()
