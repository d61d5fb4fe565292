"""Traces as one `.npz` file: experts uint8 [tokens, MoE layers, k], offsets [sequences + 1], and optional columns."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from .errors import TraceError
from .topology import MoeTopology
from .trace import SequenceRouting, Trace, TraceHeader


class NpzTrace(Trace):
    """Read an `.npz` trace; experts per layer = 1 + the largest id in the file."""

    def __init__(self, path: Path, header: TraceHeader, arrays: dict[str, np.ndarray]) -> None:
        super().__init__(path, header, [])
        self.arrays = arrays

    @classmethod
    def open(cls, path: str | Path) -> NpzTrace:
        """Open the file, without ever unpickling.

        Raises:
            TraceError: if the file is missing, damaged, or its arrays do not fit together.
        """
        path = Path(path)
        try:
            with path.open("rb") as raw, zipfile.ZipFile(raw):  # np.load leaves a file open that is no archive
                raw.seek(0)
                with np.load(raw, allow_pickle=False) as file:
                    arrays = {name: file[name] for name in file.files}
        except (OSError, ValueError, RuntimeError, zipfile.BadZipFile, EOFError, zlib.error) as error:
            raise TraceError(
                f"{path} is no readable .npz trace ({error}); give a file with experts and offsets."
            ) from error
        _check(path, arrays)
        experts = arrays["experts"]
        num_experts = int(experts.max()) + 1
        topology = MoeTopology.uniform(experts.shape[1], max(num_experts, experts.shape[2]), experts.shape[2])
        token_ids = arrays.get("token_ids")
        vocab_size = None if token_ids is None else int(token_ids.max()) + 1
        return cls(path, TraceHeader(topology=topology, model=path.stem, vocab_size=vocab_size), arrays)

    def __iter__(self) -> Iterator[SequenceRouting]:
        experts, offsets = self.arrays["experts"], self.arrays["offsets"]
        token_ids, weights = self.arrays.get("token_ids"), self.arrays.get("weights")
        prompt_len, conversation = self.arrays.get("prompt_len"), self.arrays.get("conversation")
        category = self.arrays.get("category")
        for index, (start, stop) in enumerate(zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)):
            yield SequenceRouting(
                sequence=str(index),
                group=None if conversation is None else str(conversation[index]),
                category=None if category is None else str(category[index]),
                source=f"{self.path.name}:{index}",
                prompt_tokens=None if prompt_len is None else int(prompt_len[index]),
                token_ids=None if token_ids is None else token_ids[start:stop].astype(np.int32, copy=False),
                experts=experts[start:stop].reshape(stop - start, -1).astype(np.int16),
                weights=None if weights is None else weights[start:stop].reshape(stop - start, -1),
            )


def _check(path: Path, arrays: dict[str, np.ndarray]) -> None:
    """Refuse arrays that do not fit together."""
    for name in ("experts", "offsets"):
        if name not in arrays:
            raise TraceError(
                f"{path} has no array {name!r}; an .npz trace needs experts [tokens, layers, k] and offsets."
            )
    experts, offsets = arrays["experts"], arrays["offsets"]
    if experts.ndim != 3 or not np.issubdtype(experts.dtype, np.integer) or experts.size == 0:
        raise TraceError(f"{path}: experts must be integers [tokens, layers, k], got {experts.dtype} {experts.shape}.")
    whole = offsets.ndim == 1 and len(offsets) > 1 and np.issubdtype(offsets.dtype, np.integer)
    if not whole or offsets[0] != 0 or offsets[-1] != len(experts) or (np.diff(offsets) < 0).any():
        got = f"{offsets.dtype} {offsets.ravel()[:1].tolist()} to {offsets.ravel()[-1:].tolist()}"
        raise TraceError(
            f"{path}: offsets must rise from 0 to the number of tokens, {len(experts)}, as integers; got {got}."
        )
    for name, per in (
        ("token_ids", len(experts)),
        ("weights", len(experts)),
        ("prompt_len", len(offsets) - 1),
        ("conversation", len(offsets) - 1),
        ("category", len(offsets) - 1),
    ):
        if name in arrays and arrays[name].shape[:1] != (per,):
            raise TraceError(f"{path}: {name} has shape {arrays[name].shape}, expected {per} entries.")
