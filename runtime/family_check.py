"""Trying a family: a tiny random model of it is recorded, packed, run with few slots and compared bit for bit.

Knows models and stores; knows nothing of the table that its rows go into.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from ..collect import tiny_models
from ..collect.anatomy import text_model
from ..collect.architectures import find_moe_modules, left_as_they_are, topology_of
from ..collect.batches import Piece
from ..collect.corpora import Document
from ..collect.errors import ForegateError, ModelError
from ..collect.passes import Generation, Passes
from ..collect.recorder import LayerRouting, NoScoresError, RoutingRecorder
from ..collect.row_checks import RowCheck
from ..collect.sequence import SequenceRouting
from ..collect.trace import TraceHeader
from .families import FamilyRow, Verdict
from .loading import load
from .pack import pack
from .verify import VerifyReport, verify

log = logging.getLogger(__name__)

LENGTHS = (7, 12, 3)  # tokens of the texts of one padded batch
NEW_TOKENS = 4
VERIFY_TOKENS = 4
PADDING_SHOWS = 0.1  # share of tokens; rounding alone may change the choice of a token between equals

LEFT_PADDING = {"deepseek_v4", "minimax"}
"""Families whose generations in a padded batch differ from those of each text alone, as they do in transformers."""


def check_family(name: str, folder: Path | None = None) -> FamilyRow:
    """Try a family and give its row; what goes wrong is the row's reason.

    Args:
        name: a family's name.
        folder: where checkpoint and stores go; a temporary folder by default.
    """
    if name not in tiny_models.FAMILIES:
        return _row(name, reason="no tiny model of it is known (collect/tiny_models), so nothing could be tried")
    with _one_thread():
        try:
            notes = _record(name)
        except Exception as error:  # whatever a family raises is its row's reason
            return _row(name, reason=_said("record", error))
        try:
            with tempfile.TemporaryDirectory(prefix="foregate-family-", dir=folder) as place:
                reports = [_offload(name, dtype, Path(place)) for dtype in (torch.float32, torch.bfloat16)]
        except Exception as error:
            return _row(name, record="validated", reason=_said("offload", error))
    for report in reports:
        if not report.identical:
            return _row(name, record="validated", reason=f"offload: {' '.join(report.describe().split())}")
    return _row(name, record="validated", offload="validated", verify="validated", reason="; ".join(notes))


def _row(
    name: str,
    record: Verdict = "unsupported",
    offload: Verdict = "unsupported",
    verify: Verdict = "unsupported",
    reason: str = "",
) -> FamilyRow:
    return FamilyRow(model_type=name, record=record, offload=offload, verify=verify, reason=reason)


def _said(what: str, error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{what}: {text}" if isinstance(error, ForegateError) else f"{what}: {type(error).__name__}: {text}"[:300]


def _record(name: str) -> list[str]:
    """Record a padded batch and, where the family generates, a generation; give what there is to know."""
    model = tiny_models.build(name)
    notes = _notes(model)
    pieces = _pieces(paired="encoder" in topology_of(model).stacks)
    scores = _has_scores(model)
    with RoutingRecorder(model, scores=scores) as recorder:
        if not scores:
            notes.append("no scores: its ids come from no top-k and no single argmax")
        header = TraceHeader(
            topology=topology_of(model), vocab_size=tiny_models.VOCAB_SIZE, scores="selection" if scores else ""
        )
        check = RowCheck(header)
        kinds: list[Generation | None] = [None]
        if text_model(model).can_generate() and not hasattr(model.config, "canvas_length"):
            kinds.append(Generation(max_new_tokens=NEW_TOKENS))
        else:
            notes.append("recorded as a plain forward only")
        for generation in kinds:
            passes = Passes(model, recorder, tiny_models.tokenizer(), generation)
            together = passes(pieces, 0)
            for row in (row for rows in together for row in rows):
                problems = check(row)
                if problems:
                    raise ModelError(f"The recorded row {row.sequence} is wrong: {problems[0]}.")
            if generation is None or name not in LEFT_PADDING:
                _same_as_alone(together, [passes([piece], 0)[0] for piece in pieces])
    if name in LEFT_PADDING:
        notes.append("generations want batches of one text: padding on the left changes what it computes")
    return notes


def _same_as_alone(together: list[list[SequenceRouting]], alone: list[list[SequenceRouting]]) -> None:
    """Compare rows of a padded batch with those of each text by itself, as far as both go."""
    tokens = differing = 0
    for left, right in zip(together, alone, strict=True):
        for one, other in zip(left, right, strict=True):
            both = min(one.num_tokens, other.num_tokens)
            rows = [np.sort(row.experts[:both], axis=1) for row in (one, other)]
            differing += int((rows[0] != rows[1]).any(axis=1).sum())
            tokens += both
    if differing > PADDING_SHOWS * tokens:
        raise ModelError(f"In a padded batch {differing} of {tokens} tokens are routed otherwise than alone.")


def _has_scores(model: nn.Module) -> bool:
    """Say whether the family's ids come from a top-k, so that its scores can be recorded."""
    with torch.inference_mode(), RoutingRecorder(model, scores=True) as recorder:
        text_model(model)(**_inputs(model))
        try:
            recorder.take()
        except NoScoresError:
            return False
    return True


def _notes(model: nn.Module) -> list[str]:
    notes = []
    left = left_as_they_are(model)
    if left:
        notes.append(f"text only: experts outside of it ({left[0].split('.experts')[0]}, ..) stay in memory")
    modules = find_moe_modules(model)
    if any(item.num_calls > 1 for item in modules):
        notes.append("a block that runs several times has a MoE layer for each pass")
    elif any(item.home != index for index, item in enumerate(modules)):
        notes.append("encoder and decoder share their experts in the store")
    return notes


def _offload(name: str, dtype: torch.dtype, folder: Path) -> VerifyReport:
    """Pack, load with few slots, compare the routing and the bits."""
    model: Any = tiny_models.build(name).to(dtype=dtype)  # type: ignore[call-overload]
    checkpoint, store = folder / f"model-{dtype}", folder / f"store-{dtype}"
    model.save_pretrained(checkpoint)
    pack(checkpoint, store)
    slots = max(layer.top_k for layer in topology_of(model).layers) + 1
    report = verify(store, tokens=VERIFY_TOKENS, slots=slots, reference=checkpoint)
    if not report.identical:
        return report
    if dtype == torch.float32:
        report = verify(store, tokens=VERIFY_TOKENS, slots=slots)  # with the store's own bytes
        _same_routing(model, store, slots)
    if report.misses <= report.slots:
        raise ModelError(f"Only {report.misses} experts were read for {report.slots} slots: nothing was tried.")
    return report


def _same_routing(resident: nn.Module, store: Path, slots: int) -> None:
    """Record the offloaded model, whose experts differ by rounding at most from the resident one's choice."""
    for item in find_moe_modules(resident):
        config: Any = getattr(resident.get_submodule(item.name), "config", None)
        if config is not None and getattr(config, "_experts_implementation", None):
            config._experts_implementation = "grouped_mm"
    offloaded = load(store, slots=slots)
    with offloaded.foregate:
        for index, (left, right) in enumerate(zip(_routing(resident), _routing(offloaded), strict=True)):
            if not np.array_equal(left.experts, right.experts):
                raise ModelError(f"MoE layer {index} routes otherwise when it is offloaded.")


def _routing(model: nn.Module) -> list[LayerRouting]:
    with torch.inference_mode(), RoutingRecorder(model) as recorder:
        text_model(model)(**_inputs(model))
        return recorder.take()


def _inputs(model: Any) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(4, 260, (2, 6), generator=generator)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    canvas = getattr(model.config, "canvas_length", None)
    if canvas or "encoder" in topology_of(model).stacks:
        inputs["decoder_input_ids"] = torch.randint(4, 260, (2, canvas or 5), generator=generator)
    return inputs


def _pieces(*, paired: bool) -> Sequence[Piece]:
    generator = np.random.default_rng(0)
    pieces = []
    for number, length in enumerate(LENGTHS):
        ids, target = (generator.integers(4, 260, size).tolist() for size in (length, 5))
        document = Document(source=str(number), text="")
        pieces.append(Piece(str(number), ids, target if paired else None, document, None))
    return pieces


@contextmanager
def _one_thread() -> Iterator[None]:
    """Compute on one thread: tiny products wait for each other longer than they work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
