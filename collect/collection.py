"""One recording run: a model, a corpus and settings in, a trace out. Knows the order of work, and no command line."""

from __future__ import annotations

import importlib.metadata
import itertools
import logging
import platform
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .anatomy import text_model
from .architectures import model_fingerprint, topology_of
from .batches import Piece, batches_of, pieces_of
from .config import CollectConfig
from .corpora import Columns, Document, open_corpus
from .errors import DataError, SettingError
from .passes import Generation, Passes
from .pretrained import load_pretrained, model_name, tokenizer_fingerprint
from .ranks import Ranks
from .recorder import RoutingRecorder
from .resume import check_target
from .sequence import SequenceRouting
from .trace import TraceHeader, WeightsKind
from .writer import TraceWriter, WriterConfig

__all__ = ["CollectConfig", "CollectResult", "collect"]

log = logging.getLogger(__name__)

PROBE_TOKENS = 16  # of the first text, run once before anything is written
Progress = Callable[[int, int], None]  # (sequences, tokens) that were recorded since the last call


class CollectResult(NamedTuple):
    """Say what a trace holds after a run, the same in each of its processes."""

    trace: Path
    sequences: int
    """Sequences of the whole trace."""
    tokens: int
    """Tokens of the whole trace, of both stacks where there are two."""
    new_sequences: int
    """Sequences that this run recorded, in all its processes."""
    new_tokens: int
    """Tokens that this run recorded, in all its processes."""
    seconds: float
    """Time of this process's forwards and writing, without loading the model."""
    rank: int = 0
    """Which of the run's processes this is."""


def collect(
    config: CollectConfig, *, loaded: tuple[Any, Any] | None = None, progress: Progress | None = None
) -> CollectResult:
    """Record a trace. Runs with equal settings give equal traces, whether or not they were interrupted and resumed.

    Started by torchrun, each process runs every so-manieth batch and writes shards of its own into the same folder; the
    rows are those of a run in one process.

    Args:
        config: settings.
        loaded: a model and its tokenizer, in place of loading `config.model`.
        progress: called after each window of batches.

    Raises:
        DataError: if the corpus is missing, cannot be read, or holds no text.
        ModelError: if the model cannot be loaded or recorded.
        TraceError: if there is a trace already that this run may not go on with.
        ForegateError: if another of several processes has ended before its time.
        OSError: on a full disk, with the shards written so far left valid.
    """
    with Ranks.from_environment() as ranks:
        check_target(Path(config.out), resume=config.resume)
        ranks.barrier()  # so that no rank takes another's new trace for an old one
        return _collect(config, ranks, loaded, progress)


def _collect(
    config: CollectConfig, ranks: Ranks, loaded: tuple[Any, Any] | None, progress: Progress | None
) -> CollectResult:
    documents = _documents(config)
    model: Any
    model, tokenizer = loaded or load_pretrained(
        config.model, dtype=config.dtype, device=_device(config, ranks), trust_remote_code=config.trust_remote_code
    )
    model.eval()
    generation = None
    if config.generate:
        generation = Generation(max_new_tokens=config.generate, temperature=config.temperature, seed=config.seed)
    vocab_size = int(text_model(model).get_input_embeddings().num_embeddings)
    pieces = pieces_of(
        documents,
        tokenizer,
        max_tokens=_max_tokens(config, model),
        overflow=config.overflow,
        text_to_text=bool(model.config.is_encoder_decoder),
        vocab_size=vocab_size,
    )
    first = next(pieces, None)
    if first is None:
        raise DataError(f"{config.data} holds no text that the tokenizer makes tokens of; give another --data.")
    pieces = itertools.islice(itertools.chain([first], pieces), config.max_sequences)
    with RoutingRecorder(model, **_optional(config)) as recorder:
        passes = Passes(model, recorder, tokenizer, generation, text=config.with_text)
        header = TraceHeader(
            topology=topology_of(model),
            model=model_name(config.model),
            model_fingerprint=model_fingerprint(model.config),
            tokenizer_fingerprint=tokenizer_fingerprint(tokenizer),
            vocab_size=vocab_size,
            dtype=str(model.dtype).removeprefix("torch."),
            versions=_versions(),
            weights=probe_weights(model, recorder, tokenizer, first),
            scores="selection" if config.scores else "",
            hidden="gates" if config.hidden else "",
            generation=_generation(config),
            recording=_recording(config),
            seed=config.seed,
        )
        start = time.perf_counter()
        with _open_in_turn(config, header, ranks) as writer:
            _run(passes, pieces, config.batch_size, writer, ranks, progress)
            if ranks.rank:
                writer.close()
            ranks.barrier()  # rank 0 closes last: it is the one that takes an empty trace back
        seconds = time.perf_counter() - start
    stats = writer.statistics()
    new_sequences, new_tokens = map(sum, zip(*ranks.gather([stats.sequences, stats.tokens]), strict=True))
    return CollectResult(
        trace=Path(config.out),
        sequences=stats.resumed_sequences + new_sequences,
        tokens=stats.resumed_tokens + new_tokens,
        new_sequences=new_sequences,
        new_tokens=new_tokens,
        seconds=seconds,
        rank=ranks.rank,
    )


def _open_in_turn(config: CollectConfig, header: TraceHeader, ranks: Ranks) -> TraceWriter:
    """Open the trace: rank 0 first, who writes the header, then the others; all before anybody writes a row."""

    def opened() -> TraceWriter:
        sizes = WriterConfig(rank=ranks.rank, shard_rows=config.shard_rows)
        resume = config.resume or ranks.rank > 0
        return TraceWriter(config.out, header, resume=resume, config=sizes, text=config.with_text)

    writer = opened() if ranks.rank == 0 else None
    try:
        ranks.barrier()
        writer = writer or opened()
        ranks.barrier()
    except BaseException:
        if writer is not None:
            writer.close()
        raise
    return writer


def _run(
    passes: Passes,
    pieces: Iterator[Piece],
    batch_size: int,
    writer: TraceWriter,
    ranks: Ranks,
    progress: Progress | None,
) -> None:
    """Run window by window; within one, rows are put back into the order of the corpus before they are written."""
    number = 0
    for window in batches_of(pieces, batch_size):
        rows: dict[int, list[SequenceRouting]] = {}
        num_sequences = 0
        for batch in window:
            if number % ranks.size == ranks.rank:
                num_sequences += len(batch)
                # a batch runs whole or not at all: in a smaller one, sums round differently and near ties may flip
                if not all(writer.finished(piece.sequence) for _, piece in batch):
                    results = passes([piece for _, piece in batch], number)
                    rows |= {place: result for (place, _), result in zip(batch, results, strict=True)}
            number += 1
        new = [rows[place] for place in sorted(rows) if not writer.finished(rows[place][0].sequence)]
        for group in new:
            writer.write(*group)
        if progress is not None:
            progress(num_sequences, sum(row.num_tokens for group in new for row in group))


def _device(config: CollectConfig, ranks: Ranks) -> str:
    """Give each of several processes on one machine its own device."""
    import torch

    if config.device != "auto" or ranks.size == 1 or not torch.cuda.is_available():
        return config.device
    return str(torch.device("cuda", ranks.local_rank % torch.cuda.device_count()))


def _documents(config: CollectConfig) -> Iterator[Document]:
    """Open the corpus and read its first document, so that a wrong name fails before a model is loaded."""
    columns = Columns(
        text=config.text_column,
        target=config.target_column,
        group=config.group_column,
        category=config.category_column,
    )
    documents = open_corpus(config.data, split=config.split, subset=config.subset, columns=columns)
    first = next(documents, None)
    if first is None:
        raise DataError(f"{config.data} holds no text; give another --data or --split.")
    return itertools.chain([first], documents)


def _max_tokens(config: CollectConfig, model: Any) -> int:
    """Cap the length of a sequence at what the model can place, with room for what it generates."""
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if limit is None or model.config.is_encoder_decoder:
        return config.max_tokens
    room = limit - config.generate
    if room < 1:
        raise SettingError(f"generate must be less than the model's {limit} positions, got {config.generate}.")
    if config.max_tokens > room:
        log.info("max_tokens is %d, not %d: the model has %d positions", room, config.max_tokens, limit)
    return min(config.max_tokens, room)


def _optional(config: CollectConfig) -> dict[str, bool]:
    """Name what is recorded beside experts and weights."""
    return {name: True for name in ("scores", "hidden") if getattr(config, name)}


def probe_weights(model: Any, recorder: RoutingRecorder, tokenizer: Any, piece: Piece) -> WeightsKind:
    """Run a few tokens, so that a model that cannot be recorded fails early, and see whether its weights sum to 1."""
    short = piece._replace(token_ids=piece.token_ids[:PROBE_TOKENS])
    groups = Passes(model, recorder, tokenizer, None)([short], 0)
    for row in (row for group in groups for row in group):
        assert row.weights is not None
        layers = [recorder.topology.layers[i] for i in recorder.topology.layers_of(row.stack)]
        starts = np.cumsum([0, *(layer.top_k for layer in layers[:-1])])
        sums = np.add.reduceat(row.weights.astype(np.float32), starts, axis=1)  # of float16, sums drift
        if (np.abs(sums - 1) > 0.01).any() or (row.weights < 0).any():
            return "finite"
    return "normalized"


def _versions() -> dict[str, str]:
    names = ("foregate", "torch", "transformers", "tokenizers", "numpy", "pyarrow")
    return {"python": platform.python_version()} | {name: importlib.metadata.version(name) for name in names}


def _generation(config: CollectConfig) -> dict[str, Any]:
    if not config.generate:
        return {}
    return {"max_new_tokens": config.generate, "temperature": config.temperature}


def _recording(config: CollectConfig) -> dict[str, Any]:
    """What decides which sequence stands under which id; a resumed run must agree in it."""
    columns = {f"{name}_column": getattr(config, f"{name}_column") for name in ("text", "target", "group", "category")}
    data = Path(config.data).name if Path(config.data).exists() else config.data
    return {
        "data": data,
        "subset": config.subset,
        "split": config.split,
        "max_tokens": config.max_tokens,
        "overflow": config.overflow,
        "batch_size": config.batch_size,
        "with_text": config.with_text,
        **columns,
    }
