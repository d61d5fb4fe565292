"""Settings of a runtime. The same class feeds `load`, the command line and YAML."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import psutil

from ..collect.errors import SettingError
from ..collect.topology import MoeTopology

Mode = Literal["off", "observe", "enforce", "auto"]
ReaderKind = Literal["auto", "direct", "preadv", "seek"]
MAX_THREADS = 64  # queue depth at which disks are no faster; each thread costs memory
DEFAULT_MEMORY_SHARE = 0.5  # of what is available, where neither slots nor budget are given


@dataclass(frozen=True, kw_only=True)
class RuntimeConfig:
    """Say how much of a model's experts to hold and how to move the rest."""

    slots: float | int | None = None
    """Experts to hold: a share of all experts (0 < share <= 1) or a number of at least 2; see `num_slots`."""
    budget: int | str | None = None
    """Bytes to hold them in, instead of `slots`: a number, or text such as 512MiB or 2GiB."""
    predictor: str | None = None
    """Predictor bundle, a folder or hub:OWNER/NAME[@REVISION]; none reads on demand only."""
    mode: Mode = "auto"
    """off ignores the predictor, observe scores it, enforce acts on it, auto acts while it pays."""
    threads: int = 2
    """Threads that read the store."""
    reader: ReaderKind = "auto"
    """How the store is read; auto takes the fastest that the file system has."""
    chunk_kib: int = 1024
    """Piece in which a prefetch is read, and after which a demand goes first; a multiple of 4."""
    prefetch_threshold: float = 0.5
    """Smallest probability for which an expert is prefetched."""
    probation: float = 0.1
    """Share of the slots that prefetched experts may hold before they are used; 0 prefetches nothing."""

    def __post_init__(self) -> None:
        if self.slots is not None and self.budget is not None:
            raise SettingError(f"Give slots or budget, not both; got slots={self.slots} and budget={self.budget}.")
        if self.slots is not None:
            _count(self.slots, 1)
        if self.budget is not None:
            parse_bytes(self.budget)
        if self.mode not in get_args(Mode):
            raise SettingError(f"mode must be one of {', '.join(get_args(Mode))}, got {self.mode!r}.")
        if self.reader not in get_args(ReaderKind):
            raise SettingError(f"reader must be one of {', '.join(get_args(ReaderKind))}, got {self.reader!r}.")
        if not 1 <= self.threads <= MAX_THREADS:
            raise SettingError(f"threads must be at least 1 and at most {MAX_THREADS}, got {self.threads}.")
        if self.chunk_kib < 4 or self.chunk_kib % 4:
            raise SettingError(f"chunk_kib must be a positive multiple of 4, got {self.chunk_kib}.")
        for name in ("prefetch_threshold", "probation"):
            if not 0 <= getattr(self, name) < 1:
                raise SettingError(f"{name} must lie in [0, 1), got {getattr(self, name)}.")

    def num_slots(self, topology: MoeTopology, block_bytes: int) -> int:
        """Resolve slots or budget to the number of experts that are held, at most all of them.

        Where not all are, memory takes one slot more: an event larger than the cache passes through it.

        Raises:
            SettingError: if the result cannot hold one token's experts of every layer.
        """
        experts = topology.num_experts
        if self.slots is not None:
            held, said = _count(self.slots, experts), f"slots {self.slots}"
        else:
            if self.budget is not None:
                memory, said = parse_bytes(self.budget), f"budget {self.budget}"
            else:
                memory, said = int(available_bytes() * DEFAULT_MEMORY_SHARE), "half of the available memory"
            held = memory // block_bytes
            if held < experts:
                held -= 1
        least = max(layer.top_k for layer in topology.layers)
        if held < least:
            raise SettingError(
                f"{said} holds {max(0, held)} experts of {block_bytes} bytes, but one token needs {least} of a layer "
                f"at once; give budget={(least + 1) * block_bytes} or slots={max(2, least)} at least."
            )
        return min(held, experts)


def _count(slots: float | int, experts: int) -> int:
    """Read a share of all experts or a number of slots; 1 and 1.0 both mean all of them."""
    if isinstance(slots, int | float) and 0 < slots <= 1:
        return int(slots * experts + 1e-9)  # 0.29 * 100 is a little less than 29
    if isinstance(slots, int | float) and slots > 1 and float(slots).is_integer():
        return int(slots)
    raise SettingError(f"slots must be a share in (0, 1] or a whole number of at least 2, got {slots!r}.")


def parse_bytes(text: int | str) -> int:
    """Read a number of bytes such as 1048576, 512MiB or 1.5GB.

    Raises:
        SettingError: if the text is no positive number of bytes.
    """
    units = {"": 1, "B": 1}
    for power, prefix in enumerate("KMGT", start=1):
        units[f"{prefix}B"] = 1000**power
        units[f"{prefix}IB"] = units[prefix] = 1024**power
    plain = str(text).strip().upper().replace("_", "")
    number = plain.rstrip("BIKMGT ")
    try:
        value = int(float(number) * units[plain[len(number) :].strip()])
    except (KeyError, ValueError, OverflowError):
        value = 0
    if value <= 0:
        raise SettingError(f"{text!r} is no number of bytes; give one such as 1048576, 512MiB or 2GiB.")
    return value


def available_bytes() -> int:
    """Give the bytes that may still be allocated: of the machine, or of its control group where that is less."""
    available = psutil.virtual_memory().available
    groups = (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    )
    for limit_name, usage_name in groups:
        root = Path(os.sep, "sys", "fs", "cgroup")
        try:
            limit = int((root / limit_name).read_text())
            usage = int((root / usage_name).read_text())
        except (OSError, ValueError):  # no such group, or "max"
            continue
        available = min(available, max(0, limit - usage))
    return available
