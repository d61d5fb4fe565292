"""The predictor of `foregate bench replay` where none is named: trained on the first 80 % of the trace's sequences."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..collect.smoke import smoke

if TYPE_CHECKING:
    from ..runtime.bench.replay import ReplayBench

MINUTES, SMOKE_MINUTES = 6.0, 0.1
HELD_OUT = 0.2


@contextlib.contextmanager
def with_predictor(settings: ReplayBench) -> Iterator[ReplayBench]:
    """Give the settings with a predictor; one that is trained here goes when the block ends.

    Raises:
        TraceError, DataError: if the trace cannot be trained on.
    """
    if settings.predictor is not None or not settings.trace_path.exists():
        yield settings
        return
    from ..train.fit import train
    from ..train.split import SplitSettings

    with tempfile.TemporaryDirectory(prefix="foregate-replay-") as folder:
        out = Path(folder) / "bundle"
        split = SplitSettings(order="file", test_share=HELD_OUT)
        train(settings.trace_path, out, max_minutes=smoke(MINUTES, SMOKE_MINUTES), split=split)
        yield replace(settings, predictor=str(out))
