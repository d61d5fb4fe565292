"""Comparing an offloaded model with the resident one, bit for bit. Knows both models; knows nothing of caches.

The resident model generates greedily, ignoring end-of-sequence; the offloaded one is fed exactly these tokens, the
prompt at once and then one token per step, and its logits are compared at every step. Besides, every expert's bytes,
the dense files and, at the end, the slots are compared with the store's checksums.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from pydoc_data import topics
from typing import Any

import torch
from transformers import PreTrainedModel

from ..collect.anatomy import text_model
from ..collect.errors import ModelError, SettingError
from ..collect.wording import counted
from .checkpoint import find_folder, open_tokenizer
from .loading import load
from .manifest import MANIFEST
from .pack import pack
from .reference import open_reference
from .store import ExpertStore
from .walk import walk

# B batch, P prompt tokens, N new tokens, V vocabulary

log = logging.getLogger(__name__)

PROMPT_TOKENS = 48
TOPICS = ("assignment", "lambda", "formatstrings", "class")  # pages of Python's documentation
DEFAULT_SLOTS = 0.25


@dataclass(frozen=True, kw_only=True)
class VerifyReport:
    """What a comparison found."""

    identical: bool
    """Whether all logits are equal bit for bit and no byte is damaged."""
    tokens: int
    """New tokens that were compared."""
    max_abs_diff: float
    """Largest difference of two logits."""
    first_difference: int | None
    """Step of the first difference, 0 being the prompt; None where there is none."""
    damaged_experts: int
    """Experts whose bytes in the store differ from their checksum."""
    damaged_slots: int
    """Slots that did not hold their expert's bytes at the end."""
    damaged_files: tuple[str, ...]
    """Dense files that were altered."""
    prompt_tokens: int
    """Tokens of the prompts."""
    slots: int
    """Experts held at once."""
    experts: int
    """Routed experts of the model."""
    misses: int
    """Experts that the offloaded run read on demand."""
    reference: str
    """Where the resident model came from."""

    def describe(self) -> str:
        """Say it in words, one finding per line."""
        held = f"{self.slots} of {self.experts} experts held, {self.misses} read on demand"
        lines = [f"{'identical' if self.identical else 'NOT identical'}: {counted(self.tokens, 'token')}, {held}"]
        if self.first_difference is not None:
            lines.append(
                f"logits differ from step {self.first_difference} on, by up to {self.max_abs_diff:.3g}; "
                f"the resident model came from {self.reference}"
            )
        if self.damaged_experts:
            match = (
                "expert of the store does not match its checksum",
                "experts of the store do not match their checksums",
            )
            lines.append(f"{counted(self.damaged_experts, *match)}; pack it again")
        if self.damaged_files:
            lines.append(f"altered: {', '.join(self.damaged_files)}; pack the store again")
        if self.damaged_slots:
            lines.append(f"{counted(self.damaged_slots, 'slot')} did not hold their expert's bytes")
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """Give the values as plain JSON."""
        return {**vars(self), "damaged_files": list(self.damaged_files)}


def verify(
    model: str | Path,
    *,
    tokens: int = 64,
    slots: float | int | None = None,
    budget: int | str | None = None,
    predictor: str | Path | None = None,
    reference: str | Path | None = None,
    prompt: str | None = None,
    trust_remote_code: bool = False,
    **settings: Any,
) -> VerifyReport:
    """Compare a store with the resident model; a plain checkpoint is packed to a temporary store first.

    Args:
        model: store, or a checkpoint to pack (folder, packaged mini model or hub name).
        tokens: new tokens to compare per prompt.
        slots: experts to hold, as a share or a number (a quarter by default); `budget` gives bytes instead.
        predictor: bundle to run with.
        reference: checkpoint to compare with; without it the resident model is built from the store's own bytes.
        prompt: text to start from; by default a page of Python's documentation, or several for an encoder-decoder,
            whose experts depend more on its input.
        settings: further settings of `load`, as mode, threads and reader.

    Raises:
        ModelError: if the reference is another model or does not fit in memory.
        StoreError: if the store is refused.
        SettingError: if a setting is out of range.
    """
    if tokens < 1:
        raise SettingError(f"tokens must be at least 1, got {tokens}.")
    if slots is None and budget is None:
        slots = DEFAULT_SLOTS
    with _as_store(model, trust_remote_code) as (path, packed):
        store = ExpertStore.open(path, trust_remote_code=trust_remote_code)
        damaged = [flat for flat, expert in enumerate(store) if not store.verify_expert(flat, store[expert])]
        damaged_files = tuple(file.name for file in store.damaged_dense_files())
        if damaged_files:  # such a store is not loaded
            return _refused(store, len(damaged), damaged_files, reference)
        if packed and reference is None:
            reference = model  # the checkpoint itself is the better witness
        resident = open_reference(store, reference, trust_remote_code=trust_remote_code)
        prompts = _prompts(path, resident, prompt, tokens)
        expected = [walk(resident, ids_BP, tokens) for ids_BP in prompts]
        del resident
        offloaded = load(
            path, slots=slots, budget=budget, predictor=predictor, trust_remote_code=trust_remote_code, **settings
        )
        with offloaded.foregate as handle:
            got = [
                walk(offloaded, ids_BP, tokens, forced=chosen)
                for ids_BP, (chosen, _) in zip(prompts, expected, strict=True)
            ]
            slots_damaged = handle.damaged_slots()
            stats = handle.stats()
    pairs = [
        pair
        for (_, left), (_, right) in zip(expected, got, strict=True)
        for pair in enumerate(zip(left, right, strict=True))
    ]
    differing = [step for step, (left, right) in pairs if not same_bits(left, right)]
    return VerifyReport(
        identical=not (differing or damaged or damaged_files or slots_damaged),
        tokens=sum(len(chosen) for chosen, _ in expected),
        max_abs_diff=max(max_abs_diff(left, right) for _, (left, right) in pairs),
        first_difference=min(differing, default=None),
        damaged_experts=len(damaged),
        damaged_slots=len(slots_damaged),
        damaged_files=damaged_files,
        prompt_tokens=sum(ids_BP.shape[1] for ids_BP in prompts),
        slots=stats.slots,
        experts=stats.experts,
        misses=stats.misses,
        reference=str(reference) if reference is not None else "the store's own bytes",
    )


def _refused(
    store: ExpertStore, damaged_experts: int, damaged_files: tuple[str, ...], reference: str | Path | None
) -> VerifyReport:
    """Report a store whose dense files were altered: nothing was compared."""
    return VerifyReport(
        identical=False,
        tokens=0,
        max_abs_diff=0.0,
        first_difference=None,
        damaged_experts=damaged_experts,
        damaged_slots=0,
        damaged_files=damaged_files,
        prompt_tokens=0,
        slots=0,
        experts=len(store),
        misses=0,
        reference=str(reference) if reference is not None else "the store's own bytes",
    )


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Say whether two tensors are equal bit for bit, NaN and signed zeros included."""
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    return torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))


def max_abs_diff(left: torch.Tensor, right: torch.Tensor) -> float:
    """Give the largest difference, infinite where one is NaN and the other is not."""
    difference = (left.double() - right.double()).abs()
    both_nan = left.isnan() & right.isnan()
    return float(difference.masked_fill(both_nan, 0.0).nan_to_num(nan=float("inf")).max())


@contextlib.contextmanager
def _as_store(model: str | Path, trust_remote_code: bool) -> Iterator[tuple[Path, bool]]:
    """Give the model's store and whether it had to be packed for this."""
    if (Path(model) / MANIFEST).is_file():
        yield Path(model), False
        return
    find_folder(model)  # before a store is announced that cannot be packed
    with tempfile.TemporaryDirectory(prefix="foregate-verify-") as folder:
        log.info("%s is no store; packing it to a temporary one under %s", model, tempfile.gettempdir())
        yield pack(model, Path(folder) / "store", trust_remote_code=trust_remote_code).path, True


def _prompts(path: Path, model: PreTrainedModel, prompt: str | None, tokens: int) -> list[torch.Tensor]:
    """Give the prompts' ids [1, P]; where the folder has no tokenizer, ids spread over the vocabulary."""
    text_config: Any = text_model(model).config.get_text_config()
    limit = getattr(text_config, "max_position_embeddings", None)
    if isinstance(limit, int) and tokens >= limit:
        raise SettingError(f"tokens must be less than the model's {limit} positions, got {tokens}.")
    room = limit - tokens if isinstance(limit, int) else sys.maxsize
    names = TOPICS if model.config.is_encoder_decoder else TOPICS[:1]
    try:
        tokenizer = open_tokenizer(path)
    except ModelError:
        if prompt is not None:
            raise
        markers = torch.tensor(sorted(_markers(model.config.to_dict())))
        spread = torch.arange(1, 2 * PROMPT_TOKENS * len(names) + 1) * 7919 % int(text_config.vocab_size)
        spread = spread[~torch.isin(spread, markers)][: PROMPT_TOKENS * len(names)]
        return [part[None, :room] for part in spread.split(PROMPT_TOKENS)]
    texts = [prompt] if prompt is not None else [" ".join(topics.topics[name].split()) for name in names]
    most = min(room, PROMPT_TOKENS if prompt is None else room)
    found = [tokenizer(text, verbose=False)["input_ids"][:most] for text in texts]
    if not all(found):
        raise SettingError(f"prompt must hold at least one token, got {prompt!r}.")
    return [torch.tensor([ids]) for ids in found]


def _markers(config: dict[str, Any]) -> set[int]:
    """Find the token ids that stand for something else than text: images, sounds, where they begin and end."""
    found: set[int] = set()
    for name, value in config.items():
        if isinstance(value, dict):
            found |= _markers(value)
        elif isinstance(value, int) and str(name).endswith(("_token_id", "_token_index")):
            found.add(value)
    return found
