"""The options of simulated time: a machine and the sizes of the model. Knows profiles and topologies, no commands."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..collect.errors import SettingError
from ..collect.wording import ending
from ..configs import config_names, find_config

if TYPE_CHECKING:
    from ..collect.trace import TraceHeader
    from ..runtime.hardware import HardwareProfile
    from ..runtime.time_model import ModelSizes

KIND = "hardware"
BYTES = {"float64": 8.0, "float32": 4.0, "bfloat16": 2.0, "float16": 2.0}  # of one parameter


def add_hardware(parser: Any) -> None:
    """Add `--hardware`, `--expert-mib` and `--dense-ms`."""
    parser.add_argument(
        "--hardware",
        type=str,
        default=None,
        help=f"machine that times are simulated for: {', '.join(config_names(KIND))}, or a YAML file of "
        "foregate bench hardware",
    )
    parser.add_argument(
        "--expert-mib", type=float, default=None, help="MiB of one expert, where the trace does not know or it differs"
    )
    parser.add_argument(
        "--dense-ms",
        type=float,
        default=None,
        help="milliseconds of all that is no routed expert, for one token on that machine, where the trace does not "
        "know its bytes or it differs",
    )


def hardware_of(name: str | None) -> HardwareProfile | None:
    """Load the profile of a packaged name or a file; None where none was asked for.

    Raises:
        SettingError: if there is no such profile, or it is damaged.
    """
    from ..runtime.hardware import load_profile

    if name is None:
        return None
    names = config_names(KIND)
    if not Path(name).is_file() and name not in names:
        raise SettingError(
            f"hardware must be one of {', '.join(names)}, or a file of foregate bench hardware, got "
            f"{name!r}{ending(name, names)}"
        )
    return load_profile(find_config(KIND, name))


def sizes_of(header: TraceHeader, expert_mib: float | None, dense_ms: float | None) -> ModelSizes:
    """Take the sizes from the options, and from the trace where they are not given.

    Raises:
        SettingError: if a size is out of range.
    """
    from ..runtime.time_model import ModelSizes

    if expert_mib is not None and not expert_mib > 0:
        raise SettingError(f"expert-mib must be above 0, got {expert_mib}.")
    if dense_ms is not None and not dense_ms >= 0:
        raise SettingError(f"dense-ms must be at least 0, got {dense_ms}.")
    return ModelSizes(
        expert_bytes=header.topology.expert_bytes if expert_mib is None else expert_mib * 2**20,
        dense_bytes=header.topology.dense_bytes,
        dense_s=None if dense_ms is None else dense_ms / 1e3,
        bytes_per_parameter=BYTES.get(header.dtype.removeprefix("torch."), 2.0),
    )
