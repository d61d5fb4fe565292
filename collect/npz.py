"""Traces as one `.npz` file: experts [tokens, MoE layers, k], offsets [sequences + 1], and optional columns."""

from __future__ import annotations

import lzma
import math
import tokenize
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from .checks import FEWEST_ZEROS
from .errors import TraceError
from .topology import MoeTopology
from .trace import MAX_EXPERTS, SequenceRouting, Trace, TraceHeader

# What NumPy and zipfile raise for damaged files; TokenError comes from a header with open brackets.
UNREADABLE = (
    OSError,
    ValueError,
    RuntimeError,
    EOFError,
    MemoryError,
    OverflowError,
    TypeError,
    KeyError,
    SyntaxError,
    tokenize.TokenError,
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
)


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
        if path.exists() and not path.is_file():  # a pipe would be waited for
            raise TraceError(f"{path} is no file; give an .npz file with experts and offsets.")
        try:
            with path.open("rb") as raw, zipfile.ZipFile(raw) as archive:  # np.load leaves open what is no archive
                check_archive(archive)
                raw.seek(0)
                with np.load(raw, allow_pickle=False) as file:
                    arrays = {name: file[name] for name in file.files}
        except UNREADABLE as error:
            reason = " ".join(str(error).split()).rstrip(".")
            raise TraceError(
                f"{path} is no readable .npz trace ({reason}); give a file with experts and offsets."
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
        width = experts.shape[1] * experts.shape[2]  # -1 would not do for a sequence of no tokens
        for index, (start, stop) in enumerate(zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)):
            yield SequenceRouting(
                sequence=str(index),
                group=None if conversation is None else str(conversation[index]),
                category=None if category is None else str(category[index]),
                source=f"{self.path.name}:{index}",
                prompt_tokens=None if prompt_len is None else int(prompt_len[index]),
                token_ids=None if token_ids is None else token_ids[start:stop].astype(np.int32, copy=False),
                experts=experts[start:stop].reshape(stop - start, width).astype(np.int16),
                weights=None if weights is None else weights[start:stop].reshape(stop - start, width),
            )


def check_archive(archive: zipfile.ZipFile) -> None:
    """Refuse an archive whose arrays stand twice, lie about their size or do not fit into memory, before reading any.

    Raises:
        ValueError: with the reason.
    """
    import psutil

    members = archive.infolist()
    names = [member.filename for member in members]
    if len(set(names)) < len(names):
        raise ValueError(f"{Counter(names).most_common(1)[0][0]} stands twice")
    needed, free = sum(member.file_size for member in members), psutil.virtual_memory().available
    if needed > free:
        raise ValueError(f"its arrays need {needed / 2**30:.1f} GiB of memory, {free / 2**30:.1f} GiB are free")
    for member in members:
        check_size(archive, member)


def check_size(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> None:
    """Refuse a member whose header claims another size than it has, before anything is allocated by the claim."""
    with archive.open(member) as file:
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read(file)
        if dtype.hasobject:
            raise ValueError(f"{member.filename} holds Python objects")
        claimed = math.prod(shape) * dtype.itemsize
        if claimed != member.file_size - file.tell():
            raise ValueError(f"{member.filename} claims {claimed} bytes and has {member.file_size - file.tell()}")


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
    falls = np.flatnonzero(offsets[1:] < offsets[:-1]) if whole else []  # np.diff would wrap around where unsigned
    if not whole or offsets[0] != 0 or offsets[-1] != len(experts) or len(falls):
        row = f", row {falls[0]}" if len(falls) else ""
        got = offsets[falls[0] : falls[0] + 2] if len(falls) else offsets.ravel()[[0, -1]] if offsets.size else offsets
        raise TraceError(
            f"{path}{row}: offsets must rise from 0 to the number of tokens, {len(experts)}, as integers; got "
            f"{offsets.dtype} {' to '.join(map(str, got.tolist())) or 'nothing'}."
        )
    lowest, highest = int(experts.min()), int(experts.max())
    if lowest < -1 or highest >= MAX_EXPERTS:
        token, layer, column = np.argwhere((experts < -1) | (experts >= MAX_EXPERTS))[0]
        row = int(np.searchsorted(offsets, token, side="right")) - 1
        raise TraceError(
            f"{path}, row {row}: expert {experts[token, layer, column]} at token {token - offsets[row]}, MoE layer "
            f"{layer}, is out of range -1..{MAX_EXPERTS - 1}; ids are logical ones, -1 where a token was dropped."
        )
    if highest <= 0 and experts.size >= FEWEST_ZEROS:
        raise TraceError(
            f"{path}, row 0: all {experts.size} choices are expert {'0' if lowest == 0 else '0 or none'}: the "
            "recording of a router that never ran; record again."
        )
    sequences = (len(offsets) - 1,)
    for name, shape, kinds, legal in (
        ("token_ids", experts.shape[:1], "iu", "integers"),
        ("weights", experts.shape, "f", "floats"),
        ("prompt_len", sequences, "iu", "integers"),
        ("conversation", sequences, "iuU", "integers or strings"),
        ("category", sequences, "iuU", "integers or strings"),
    ):
        found = arrays.get(name)
        if found is None:
            continue
        if found.shape != shape or found.dtype.kind not in kinds:
            raise TraceError(f"{path}: {name} must be {legal} {shape}, got {found.dtype} {found.shape}.")
        if name in ("token_ids", "prompt_len") and (found.min() < 0 or found.max() >= 2**31):
            raise TraceError(f"{path}: {name} run from {found.min()} to {found.max()}, legal is 0..{2**31 - 1}.")
