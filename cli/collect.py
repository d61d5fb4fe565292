"""Record which experts a model chooses on a corpus, as a trace."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from ..collect.config import CollectConfig
from ..collect.smoke import smoke
from ..collect.wording import counted
from .options import settings_from, settings_parser

log = logging.getLogger(__name__)

SMOKE_SEQUENCES, SMOKE_NEW_TOKENS = 24, 8


def parser() -> Any:
    """Build the parser of `foregate collect`."""
    return settings_parser("foregate collect", CollectConfig, kind="collect")


def run(args: Any) -> int:
    """Record the trace and print its size."""
    config = settings_from(args, CollectConfig)
    folder = _folder(config.model)  # before torch is imported, which takes seconds
    from .. import runtime  # transformers knows packed stores once this is imported
    from ..collect.collection import collect

    assert runtime
    most = config.max_sequences if config.max_sequences is not None else sys.maxsize
    cut = smoke(most, SMOKE_SEQUENCES)
    config = replace(
        config,
        model=folder,
        max_sequences=None if cut == sys.maxsize else cut,
        generate=smoke(config.generate, SMOKE_NEW_TOKENS),
    )
    with _progress(config.max_sequences if "WORLD_SIZE" not in os.environ else None) as progress:
        result = collect(config, progress=progress)
    if result.rank:
        return 0  # of several processes, the first one tells what all have done
    speed = result.new_tokens / result.seconds if result.new_tokens else None
    if args.json:
        values = {
            "sequences": result.sequences,
            "tokens": result.tokens,
            "seconds": round(result.seconds, 3),
            "trace": str(result.trace),
            "new_sequences": result.new_sequences,
            "tokens_per_s": None if speed is None else round(speed, 1),
        }
        print(json.dumps(values))
    else:
        new = "" if result.new_sequences == result.sequences else f" ({result.new_sequences} of them new)"
        pace = "" if speed is None else f", {speed:,.0f} tokens/s"
        sequences, tokens = counted(result.sequences, "sequence"), counted(result.tokens, "token")
        print(f"{result.trace}: {sequences}{new}, {tokens}, {result.seconds:.1f} s{pace}")
    return 0


def _folder(name: str) -> str:
    """Give the folder of a model that ships with foregate; other names stay as they are."""
    from ..runtime import models

    return models.find(name)


@contextmanager
def _progress(total: int | None) -> Iterator[Any]:
    """Show sequences and tokens per second on standard error, where that is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[tokens]:,} tokens, {task.fields[pace]:,.0f} tokens/s"),
        TimeElapsedColumn(),
    )
    console = Console(stderr=True)
    quiet = not console.is_terminal or os.environ.get("RANK", "0") != "0"  # one bar, for one process's share
    with Progress(*columns, console=console, transient=True, disable=quiet) as bar:
        task = bar.add_task("recording", total=total, tokens=0, pace=0.0)
        tokens = 0

        def advance(new_sequences: int, new_tokens: int) -> None:
            nonlocal tokens
            tokens += new_tokens
            bar.update(task, advance=new_sequences, tokens=tokens, pace=tokens / max(1e-9, bar.tasks[0].elapsed or 0.0))

        yield advance
