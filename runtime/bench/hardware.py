"""Measure this machine as a hardware profile: disk, memory, products, dispatch. Knows files and clocks, no models.

The device is host memory and the link is the disk: what this engine runs on without a GPU. Blocks are read by the
engine's own readers and transfer threads into memory that was touched before, each size with the link kept busy.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ...collect.errors import DataError, SettingError
from ...collect.smoke import smoke
from ...collect.staging import staged_file
from ...collect.topology import MoeTopology
from ..clock import Clock, SystemClock
from ..hardware import HardwareProfile
from ..store import Segment
from .machine import machine

BLOCK_KIB = (256, 1024, 4096, 16384)  # experts of small to large models in a few bits to 16
WEIGHTS_MIB = 256  # beyond every cache, so that products with it read memory
SIDE = 2048  # of square matrices whose products are bound by operations
EVENT_EXPERTS = 4


@dataclass(frozen=True, kw_only=True)
class HardwareBench:
    """Measure disk, memory, products and dispatch of this machine; --out writes them as a hardware profile."""

    out: str | None = None
    """YAML file to write the profile to, for --hardware."""
    folder: str = "."
    """Folder on the disk that is measured; a temporary file is written into it and removed."""
    name: str = "this machine"
    """Name that the profile gets."""
    file_mib: int = 1024
    """MiB of the temporary file: what blocks are read from at random places."""
    threads: int = 2
    """Threads that read."""
    rounds: int = 5
    """Rounds: the median of a block's time, and the best of everything else, since other load only takes away."""

    def __post_init__(self) -> None:
        for item in ("file_mib", "threads", "rounds"):
            if getattr(self, item) < 1:
                raise SettingError(f"{item} must be at least 1, got {getattr(self, item)}.")
        if self.out is not None and (Path(self.out).is_dir() or not Path(self.out).name):
            raise SettingError(f"{self.out} is a folder; give --out the name of a file, as here.yaml.")
        if self.out is not None and not Path(self.out).parent.is_dir():
            raise SettingError(f"{Path(self.out).parent} is no folder; give --out in one that exists.")


def bench(settings: HardwareBench, clock: Clock | None = None) -> dict[str, Any]:
    """Measure, write the profile where asked to, and give figures, the profile and the machine.

    Raises:
        DataError: if the folder cannot hold the temporary file.
    """
    import torch

    clock = clock or SystemClock()
    settings = replace(settings, file_mib=smoke(settings.file_mib, 64), rounds=smoke(settings.rounds, 2))
    with _file_of(settings) as path:
        blocks, reader = _read_blocks(path, settings, clock)
    latency_s, bytes_per_s = fit_line([(nbytes, seconds) for nbytes, seconds in blocks.items()])
    rounds = range(settings.rounds)
    memory = max(_read_memory(smoke(WEIGHTS_MIB, 16), clock) for _ in rounds)
    compute = max(_multiply(smoke(SIDE, 256), clock) for _ in rounds)
    event_s = min(_dispatch(smoke(4000, 100), clock) for _ in rounds)
    profile = HardwareProfile(
        name=settings.name,
        link={"direct": "disk with O_DIRECT"}.get(reader, f"disk through the page cache ({reader})"),
        link_gb_per_s=round(bytes_per_s / 1e9, 3),
        link_latency_us=round(latency_s * 1e6, 1),
        memory_gb_per_s=round(memory / 1e9, 2),
        compute_tflop_per_s=round(compute / 1e12, 4),
        event_overhead_us=round(event_s * 1e6, 1),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
    )
    curve = {f"read_{nbytes // 1024}_kib": _arm(nbytes, seconds) for nbytes, seconds in blocks.items()}
    result = {
        "arms": curve,
        "reader": reader,
        "threads": settings.threads,
        "torch_threads": torch.get_num_threads(),
        "profile": profile.to_json(),
        "out": settings.out,
        "machine": machine(),
    }
    if settings.out is not None:
        with staged_file(Path(settings.out)) as file:
            file.write(profile_yaml(profile, result).encode())
    return result


def describe(result: dict[str, Any]) -> str:
    """Say the figures in lines."""
    profile = result["profile"]
    lines = [
        f"{profile['link']}, {result['threads']} threads:",
        *(
            f"  blocks of {name.split('_')[1]:>6} KiB  {arm['ms']:8.3f} ms  {arm['gb_per_s']:6.2f} GB/s"
            for name, arm in result["arms"].items()
        ),
        f"link      {profile['link_gb_per_s']:.2f} GB/s and {profile['link_latency_us']:.0f} us a block",
        f"memory    {profile['memory_gb_per_s']:.1f} GB/s, reading weights in a matrix-vector product",
        f"products  {profile['compute_tflop_per_s']:.3f} TFLOP/s, float32, {result['torch_threads']} threads",
        f"an event  {profile['event_overhead_us']:.0f} us of dispatch",
    ]
    return "\n".join(lines + ([f"written to {result['out']}"] if result["out"] else []))


def profile_yaml(profile: HardwareProfile, result: dict[str, Any]) -> str:
    """Write a profile as YAML with the source of each figure beside it."""
    import yaml

    cpu, threads = result["machine"]["cpu"], result["torch_threads"]
    read = ", ".join(f"{name.split('_')[1]} KiB {arm['gb_per_s']:.2f} GB/s" for name, arm in result["arms"].items())
    sources = {
        "name": [],
        "link": [],
        "link_gb_per_s": [f"Measured: random blocks, {result['threads']} threads: {read}."],
        "link_latency_us": ["Measured: what the smaller blocks cost beyond their bytes."],
        "memory_gb_per_s": [f"Measured: float32 matrix-vector product, {threads} threads."],
        "compute_tflop_per_s": [f"Measured: square float32 matrix product, {threads} threads."],
        "event_overhead_us": ["Measured: one event of the engine, every expert resident, nothing computed."],
        "cores": [],
    }
    lines = [f"# {profile.name}: {cpu}, measured by foregate bench hardware."]
    for key, value in profile.to_json().items():
        lines += [f"# {source}" for source in sources[key]]
        lines.append(yaml.safe_dump({key: value}, allow_unicode=True).strip())
    return "\n".join(lines) + "\n"


def fit_line(points: list[tuple[int, float]]) -> tuple[float, float]:
    """Fit seconds = latency + bytes / rate with equal relative errors; give latency (at least 0) and rate."""
    if len(points) == 1:
        return 0.0, points[0][0] / points[0][1]
    nbytes, seconds = (np.array(column, np.float64) for column in zip(*points, strict=True))
    design = np.stack([1 / seconds, nbytes / seconds], axis=1)
    (latency, slope), *_ = np.linalg.lstsq(design, np.ones(len(points)), rcond=None)
    if latency < 0 or slope <= 0:  # larger blocks are slower by the byte: no latency, the mean of the rates
        return 0.0, float(np.mean(nbytes / seconds))
    return float(latency), float(1 / slope)


class _Blocks:
    """Stand in for a store: equal blocks in one file."""

    def __init__(self, path: Path, block_bytes: int, count: int) -> None:
        self.files, self.block_bytes = [path], block_bytes
        self.topology = MoeTopology.uniform(1, count, 1)

    def segments(self, flat: int) -> tuple[Segment, ...]:
        return (Segment(0, flat * self.block_bytes, self.block_bytes, 0),)


@contextmanager
def _file_of(settings: HardwareBench) -> Iterator[Path]:
    """Write bytes that do not compress and that the page cache has let go of; remove them at the end."""
    piece = np.random.default_rng(0).bytes(1 << 20)
    if not Path(settings.folder).is_dir():
        raise DataError(f"{settings.folder} is no folder; give --folder on the disk that is to be measured.")
    with tempfile.NamedTemporaryFile(dir=settings.folder, prefix=".foregate-bench-") as file:
        for index in range(settings.file_mib):
            file.write(index.to_bytes(8, "little") + piece[8:])
        file.flush()
        os.fsync(file.fileno())
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        yield Path(file.name)


def _read_blocks(path: Path, settings: HardwareBench, clock: Clock) -> tuple[dict[int, float], str]:
    """Give the median seconds per block by block size, and the kind of reader."""
    from ..readers import open_reader
    from .limit import LinkProbe

    found: dict[int, float] = {}
    with closing(open_reader([path])) as reader:
        for nbytes in (kib << 10 for kib in BLOCK_KIB):
            count = (settings.file_mib << 20) // nbytes
            if not count:
                continue  # the file is smaller than a block
            probe = LinkProbe(_Blocks(path, nbytes, count), reader, num_threads=settings.threads, clock=clock)  # pyright: ignore[reportArgumentType]
            try:
                probe()  # warms the threads up
                probe.seconds_per_block.clear()
                for _ in range(settings.rounds * max(1, (4 << 20) // nbytes)):  # a probe of small blocks is short
                    probe()
            finally:
                probe.close()
            found[nbytes] = probe.median_s
        return found, reader.kind


def _read_memory(mib: int, clock: Clock) -> float:
    """Give bytes per second of a matrix-vector product over weights that no cache holds."""
    import torch

    weights = torch.ones((mib << 20) // 4 // 1024, 1024)
    vector = torch.ones(1024)
    torch.mv(weights, vector)
    start = clock.now()
    torch.mv(weights, vector)
    return (mib << 20) / (clock.now() - start)


def _multiply(side: int, clock: Clock) -> float:
    """Give operations per second of a square float32 product."""
    import torch

    left, right = torch.ones(side, side), torch.ones(side, side)
    torch.mm(left, right)
    start = clock.now()
    torch.mm(left, right)
    return 2.0 * side**3 / (clock.now() - start)


def _dispatch(events: int, clock: Clock) -> float:
    """Give the engine's own seconds for one event whose experts are all resident."""
    from ..cache import ExpertCache
    from ..engine import ExpertEngine
    from ..policies import Lru
    from ..transfer import InlineTransfers

    topology = MoeTopology.uniform(8, 16, EVENT_EXPERTS)
    engine = ExpertEngine(topology, ExpertCache(topology.num_experts, Lru()), InlineTransfers(clock=clock), clock)
    needs = [[topology.flat(layer, expert) for expert in range(EVENT_EXPERTS)] for layer in range(topology.num_layers)]

    def serve(count: int) -> None:
        for event in range(count):
            layer = event % topology.num_layers
            with engine.acquire(layer, needs[layer], one_token=True) as experts:
                for _ in experts:
                    pass

    serve(2 * topology.num_layers)
    start = clock.now()
    serve(events)
    return (clock.now() - start) / events


def _arm(nbytes: int, seconds: float) -> dict[str, float]:
    return {"bytes": nbytes, "ms": 1e3 * seconds, "gb_per_s": nbytes / seconds / 1e9}
