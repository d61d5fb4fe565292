"""What a benchmark says of its machine: processor, memory, threads, versions. Knows no host names or paths."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from pathlib import Path
from typing import Any

CPU_INFO = Path("/proc/cpuinfo")


def machine() -> dict[str, Any]:
    """Describe the machine as plain JSON values; what cannot be found out is None.

    Threads and the accelerator are torch's, and None where nothing has imported it: a benchmark of the disk pays for
    no import.
    """
    import psutil

    return {
        "cpu": cpu_model(CPU_INFO.read_text(encoding="utf-8") if CPU_INFO.is_file() else "") or platform.processor(),
        "architecture": platform.machine(),
        "system": platform.system(),
        "cores": os.cpu_count(),
        "usable_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "python": platform.python_version(),
        **{name: _version(name) for name in ("foregate", "torch", "transformers", "numpy")},
        **_of_torch(),
    }


def cpu_model(cpu_info: str) -> str | None:
    """Take the processor's name out of the text of /proc/cpuinfo; None where it gives none."""
    for line in cpu_info.splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("model name", "Model") and value.strip():
            return " ".join(value.split())
    return None


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _of_torch() -> dict[str, Any]:
    torch = sys.modules.get("torch")
    if torch is None:
        return {"threads": None, "accelerator": None}
    accelerator = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {"threads": torch.get_num_threads(), "accelerator": accelerator}
