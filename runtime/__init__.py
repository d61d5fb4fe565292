"""Running a model whose experts do not fit in fast memory.

Expert block: one expert's weights as one contiguous byte range. Cache slot: a place for one block in the arena.
Resident: the block is in a slot. In flight: it is being read. Pin: it must not leave. Hit: resident at need; delayed
hit: in flight at need; miss: absent. Event: one (step, MoE layer), whose distinct experts are needed at once.

    import foregate.runtime                                          # transformers knows packed stores from here on
    model = foregate.runtime.load("runs/store", slots=0.25)          # an ordinary transformers model
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import registration

if TYPE_CHECKING:
    from .loading import load

__all__ = ["load"]

registration.register()


def __getattr__(name: str) -> Any:
    """Import what is heavy when it is asked for."""
    if name == "load":
        from .loading import load

        return load
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
