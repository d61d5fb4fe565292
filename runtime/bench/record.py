"""What recording costs: the same batches with and without recorder and writer, in turns. Knows no command line.

The recorded arm is what `foregate collect` runs: recorder, assembly of rows, checks, writer thread, shards on disk,
until the trace is closed. The plain arm runs the same forwards over the same ids. Both run in one process and in turns,
and each round gives one ratio, so that whatever else the machine does meets both alike. CPU time, of all threads, is
given beside the time that passed: it hardly depends on what else runs.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, get_args

import numpy as np

from ...collect.batches import Piece
from ...collect.config import Dtype
from ...collect.corpora import Document
from ...collect.errors import SettingError
from ...collect.smoke import smoke
from ...collect.trace import TraceHeader
from ..clock import Clock, SystemClock
from .machine import machine

SMOKE = {"rounds": 2, "batches": 2, "tokens": 32}  # at most, where FOREGATE_SMOKE=1


@dataclass(frozen=True, kw_only=True)
class RecordBench:
    """Measure how much slower a causal model's forward is while its routing is recorded and written."""

    model: str = "foregate-mini"
    """Name of a mini model, or folder of a transformers model."""
    batch_size: int = 8
    """Sequences of a batch."""
    tokens: int = 128
    """Tokens of a sequence."""
    batches: int = 16
    """Batches of an arm in one round, which make one trace: a window of foregate collect."""
    rounds: int = 12
    """Rounds; each runs both arms, and the arm that begins changes from round to round."""
    scores: bool = False
    """Record the router scores too."""
    dtype: Dtype = "auto"
    """Of the weights; auto is the checkpoint's own. Processors without bfloat16 take many times as long over it."""
    threads: int | None = None
    """Threads of torch; its own choice without it."""
    device: str = "auto"
    """Where the model runs: auto is the first CUDA device, or the CPU."""

    def __post_init__(self) -> None:
        for name in ("batch_size", "tokens", "batches", "rounds", "threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise SettingError(f"{name} must be at least 1, got {value}.")
        if self.dtype not in get_args(Dtype):
            raise SettingError(f"dtype must be one of {', '.join(get_args(Dtype))}, got {self.dtype!r}.")


class Spent(NamedTuple):
    """Say what one block of batches took."""

    seconds: float
    cpu_seconds: float
    """Of all threads of the process."""


def bench(settings: RecordBench, clock: Clock | None = None) -> dict[str, Any]:
    """Run the arms in turns and give medians, spread and the overhead: recorded / plain - 1.

    Raises:
        SettingError: if the model is an encoder-decoder.
        ModelError: if it cannot be loaded or recorded.
    """
    import torch

    from ...collect.collection import probe_weights
    from ...collect.pretrained import load_pretrained
    from ...collect.recorder import RoutingRecorder

    small = {name: smoke(getattr(settings, name), most) for name, most in SMOKE.items()}
    settings = replace(settings, **small)
    before = torch.get_num_threads()
    torch.set_num_threads(settings.threads or before)
    try:
        model, tokenizer = load_pretrained(_folder(settings.model), dtype=settings.dtype, device=settings.device)
        if model.config.is_encoder_decoder:
            raise SettingError(f"model must be a causal one, got {settings.model}, an encoder-decoder.")
        embeddings: Any = model.get_input_embeddings()
        vocab_size = int(embeddings.num_embeddings)
        pieces = _pieces(settings, vocab_size)
        with RoutingRecorder(model) as recorder:
            header = TraceHeader(
                topology=recorder.topology,
                vocab_size=vocab_size,
                weights=probe_weights(model, recorder, tokenizer, pieces[0][0]),
                scores="selection" if settings.scores else "",
            )
        arms: dict[str, Callable[[], None]] = {
            "plain": lambda: _plain(model, pieces),
            "recorded": lambda: _recorded(model, tokenizer, pieces, header),
        }
        spent = _in_turns(arms, settings.rounds, clock or SystemClock())
        dtype = str(embeddings.weight.dtype).removeprefix("torch.")
        return _report(settings, spent, sum(len(batch) for batch in pieces) * settings.tokens) | {"dtype": dtype}
    finally:
        torch.set_num_threads(before)


def describe(result: dict[str, Any]) -> str:
    """Say the result in lines."""
    lines = [
        f"{name:<9} {arm['tokens_per_s']:>9,.0f} tokens/s  {arm['ms_per_batch']:>8.1f} ms per batch "
        f"({arm['ms_per_batch_spread'][0]:.1f} to {arm['ms_per_batch_spread'][1]:.1f})"
        for name, arm in result["arms"].items()
    ]
    low, high = result["overhead_spread"]
    return "\n".join(
        [
            *lines,
            f"overhead  {result['overhead']:.1%} (middle half of {result['rounds']} rounds {low:.1%} to {high:.1%}), "
            f"{result['cpu_overhead']:.1%} in CPU time; {result['dtype']}",
        ]
    )


def _folder(name: str) -> str:
    from .. import models

    return models.find(name)


def _pieces(settings: RecordBench, vocab_size: int) -> list[list[Piece]]:
    """Draw batches of full length, so that no padding makes the plain arm look slower than it is."""
    generator = np.random.default_rng(0)
    ids = generator.integers(0, vocab_size, (settings.batches, settings.batch_size, settings.tokens))
    return [
        [
            Piece(f"{number}-{row}", tokens.tolist(), None, Document(source=f"{number}-{row}", text=""), None)
            for row, tokens in enumerate(batch)
        ]
        for number, batch in enumerate(ids)
    ]


def _plain(model: Any, pieces: list[list[Piece]]) -> None:
    import torch

    device = next(model.parameters()).device
    with torch.inference_mode():
        for batch in pieces:
            ids = torch.tensor([piece.token_ids for piece in batch], device=device)
            model.base_model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _recorded(model: Any, tokenizer: Any, pieces: list[list[Piece]], header: TraceHeader) -> None:
    from ...collect.passes import Passes
    from ...collect.recorder import RoutingRecorder
    from ...collect.writer import TraceWriter

    with (
        tempfile.TemporaryDirectory(prefix="foregate-bench-") as folder,
        RoutingRecorder(model, scores=bool(header.scores)) as recorder,
        TraceWriter(Path(folder) / "trace", header) as writer,
    ):
        passes = Passes(model, recorder, tokenizer, None)
        groups = [passes(batch, number) for number, batch in enumerate(pieces)]
        for rows in (rows for group in groups for rows in group):
            writer.write(*rows)


def _in_turns(arms: dict[str, Callable[[], None]], rounds: int, clock: Clock) -> dict[str, list[Spent]]:
    spent: dict[str, list[Spent]] = {name: [] for name in arms}
    names = list(arms)
    for index in range(rounds + 1):
        for name in names if index % 2 else names[::-1]:
            start, cpu_start = clock.now(), time.process_time()
            arms[name]()
            spent[name].append(Spent(clock.now() - start, time.process_time() - cpu_start))
    return {name: values[1:] for name, values in spent.items()}  # the first round warms up


def _report(settings: RecordBench, spent: dict[str, list[Spent]], num_tokens: int) -> dict[str, Any]:
    num_batches = num_tokens // (settings.batch_size * settings.tokens)
    arms = {}
    for name, values in spent.items():
        per_batch = [1000 * item.seconds / num_batches for item in values]
        arms[name] = {
            "tokens_per_s": num_tokens / statistics.median(item.seconds for item in values),
            "ms_per_batch": statistics.median(per_batch),
            "ms_per_batch_spread": [min(per_batch), max(per_batch)],
            "cpu_ms_per_batch": statistics.median(1000 * item.cpu_seconds / num_batches for item in values),
        }
    pairs = list(zip(spent["recorded"], spent["plain"], strict=True))
    ratios = [recorded.seconds / plain.seconds - 1 for recorded, plain in pairs]
    low, _, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    return {
        "arms": arms,
        "overhead": statistics.median(ratios),
        "overhead_spread": [low, high],
        "cpu_overhead": statistics.median(
            recorded.cpu_seconds / max(plain.cpu_seconds, 1e-9) - 1 for recorded, plain in pairs
        ),
        "rounds": len(ratios),
        "machine": machine(),
    }
