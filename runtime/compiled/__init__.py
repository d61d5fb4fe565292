"""Replay compiled by numba, one function per policy, where the extra `fast` is installed. Knows flat arrays only.

The semantics are those of `ExpertCache` over `runtime/policies/`, to which a property test holds every function.
Importing this package imports no numba.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from ..events import Events
from ..policies.registry import PolicySetting

if TYPE_CHECKING:
    from .foreseen import CompiledReplay

log = logging.getLogger(__name__)

Replay = Callable[[Events, PolicySetting], np.ndarray]


def how_replayed() -> str:
    """Say what replay runs in, and why."""
    version, reason = _numba()
    if version:
        return f"code compiled by numba {version}"
    return f"Python, since numba cannot be used ({reason}); the extra foregate[fast] has it"


@cache
def replays() -> dict[str, Replay]:
    """Give the compiled replays by policy, each int32 [N] misses of each event; none where numba cannot be used."""
    log.info("Replay runs in %s.", how_replayed())
    if not _numba()[0]:
        return {}
    from . import queues, ranks, scores

    return {
        "lru": queues.lru,
        "layer_lru": queues.layer_lru,
        "s3fifo": queues.s3fifo,
        "belady": ranks.belady,
        "lfu": ranks.lfu,
        "static": ranks.static,
        "lfru": scores.lfru,
        "activation": scores.activation,
        "random": scores.random,
    }


@cache
def foreseen_replay() -> type[CompiledReplay] | None:
    """Give the compiled replay of `predicted`, or None where numba cannot be used."""
    if not _numba()[0]:
        return None
    from .foreseen import CompiledReplay

    return CompiledReplay


@cache
def _numba() -> tuple[str, str]:
    """Give numba's version, or an empty one and the reason why it cannot be used."""
    try:
        import numba

        version, disabled = numba.__version__, numba.config.DISABLE_JIT  # pyright: ignore
    except Exception as error:  # a broken llvmlite raises OSError, a NumPy that does not fit AttributeError
        return "", " ".join(str(error).split())
    return ("", "NUMBA_DISABLE_JIT is set") if disabled else (version, "")
