"""Hardware profiles: the few figures of a machine that simulated time depends on. Knows YAML, no models or traces.

One link feeds the memory that experts are computed in: PCIe in front of a GPU, or the disk in front of host memory
where there is none. Packaged profiles are in `configs/hardware/`; `foregate bench hardware` measures one.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from ..collect.errors import SettingError

SMALLEST, LARGEST = 1e-9, 1e15  # of any figure: a picosecond's work to a petabyte


@dataclass(frozen=True, kw_only=True)
class HardwareProfile:
    """Hold the figures of one machine."""

    name: str
    """Name, for people."""
    link: str
    """What experts come over, for people: PCIe 4.0 x16, disk with O_DIRECT."""
    link_gb_per_s: float
    """10^9 bytes per second of a busy link."""
    link_latency_us: float
    """Microseconds that each block costs beyond its bytes."""
    memory_gb_per_s: float
    """10^9 bytes per second at which weights are read to be computed with."""
    compute_tflop_per_s: float
    """10^12 floating-point operations per second of matrix products."""
    event_overhead_us: float
    """Microseconds that each (step, MoE layer) costs beyond reading and computing: dispatch, kernel launches."""
    cores: int
    """Cores of the host."""

    def __post_init__(self) -> None:
        for name in ("name", "link"):
            if not isinstance(getattr(self, name), str):
                raise SettingError(f"{name} must be a text, got {getattr(self, name)!r}; put it in quotes.")
        for name in ("link_gb_per_s", "memory_gb_per_s", "compute_tflop_per_s", "cores"):
            check_number(name, getattr(self, name), positive=True)
        for name in ("link_latency_us", "event_overhead_us"):
            check_number(name, getattr(self, name), positive=False)

    def block_s(self, nbytes: float) -> float:
        """Give the seconds that one block takes over the busy link."""
        return self.link_latency_us * 1e-6 + nbytes / (self.link_gb_per_s * 1e9)

    def compute_s(self, nbytes: float, flop: float) -> float:
        """Give the seconds of a product: reading its weights or its operations, whichever takes longer."""
        return max(nbytes / (self.memory_gb_per_s * 1e9), flop / (self.compute_tflop_per_s * 1e12))

    def to_json(self) -> dict[str, Any]:
        """Give the profile as plain JSON values."""
        return asdict(self)


def load_profile(path: str | Path) -> HardwareProfile:
    """Read a profile from a YAML file.

    Raises:
        SettingError: if the file cannot be read, or a key is missing, unknown or out of range.
    """
    import yaml

    try:
        values = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise SettingError(f"{path} is no readable YAML file ({' '.join(str(error).split())}).") from error
    names = [item.name for item in fields(HardwareProfile)]
    if not isinstance(values, dict):
        raise SettingError(f"{path} is no hardware profile; it needs the keys {', '.join(names)}.")
    for key in values:
        if key not in names:
            near = get_close_matches(str(key), names, n=1)
            hint = f"did you mean {near[0]!r}" if near else f"legal are {', '.join(names)}"
            raise SettingError(f"{path}: a hardware profile has no key {key!r}; {hint}.")
    missing = [name for name in names if name not in values]
    if missing:
        raise SettingError(f"{path} lacks {missing[0]!r} of a hardware profile; foregate bench hardware writes one.")
    try:
        return HardwareProfile(**values)
    except SettingError as error:
        raise SettingError(f"{path}: {error}") from error


def check_number(name: str, value: object, *, positive: bool) -> None:
    """Refuse what is no number in SMALLEST..LARGEST, or 0 where that is legal too; then no time can overflow.

    Raises:
        SettingError: with the name and the value.
    """
    number = value if isinstance(value, int | float) and not isinstance(value, bool) else -1
    if SMALLEST <= number <= LARGEST or (not positive and number == 0):
        return
    legal = f"a number in {SMALLEST:g}..{LARGEST:g}" + ("" if positive else ", or 0")
    raise SettingError(f"{name} must be {legal}, got {str(value)[:40]}.")
