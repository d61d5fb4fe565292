"""Rows of a trace as predictors want them: whole sequences, dense [T, L, K] ids, many-hot vectors, statistics.

Knows traces and NumPy; knows nothing of predictors or tensors.
"""

# T tokens, L MoE layers of a stack, K experts per token, E experts, S token ids seen

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from ..collect.errors import DataError
from ..collect.topology import MoeTopology
from ..collect.trace import SequenceRouting

MAX_TABLE_TOKENS = (
    20_000  # token ids with counts of their own; at [48, 128] that is 490 MB, rarer ones share popularity
)


class RoutingStatistics(NamedTuple):
    """Hold what training sequences say before any gradient: where a network starts."""

    popularity_LE: np.ndarray
    """Share of tokens that use the expert, float32."""
    token_ids: np.ndarray
    """int64 [S], ids seen in training, most frequent first."""
    counts_S: np.ndarray
    """How often each was seen, float32."""
    uses_SLE: np.ndarray
    """How often each was seen using the expert, float32."""
    texts: tuple[str, ...] | None = None
    """The text of every token id from 0 on, None where it is not known."""


def join_parts(rows: Iterable[SequenceRouting]) -> Iterator[SequenceRouting]:
    """Join the parts of long sequences, which follow each other in a trace; empty rows are left out."""
    pending: list[SequenceRouting] = []
    for row in rows:
        if pending and (row.sequence, row.stack) != (pending[0].sequence, pending[0].stack):
            yield from _joined(pending)
            pending = []
        pending.append(row)
    yield from _joined(pending)


def _joined(parts: list[SequenceRouting]) -> Iterator[SequenceRouting]:
    parts = [part for part in parts if part.num_tokens]
    if not parts:
        return

    def stacked(name: str) -> np.ndarray | None:
        values = [getattr(part, name) for part in parts]
        return None if any(value is None for value in values) else np.concatenate(values)

    if len(parts) == 1:
        yield parts[0]
        return
    experts = stacked("experts")
    assert experts is not None
    others = {name: stacked(name) for name in ("token_ids", "weights", "scores", "hidden")}
    yield replace(parts[0], experts=experts, **others)  # type: ignore[arg-type]


def dense(row: SequenceRouting, topology: MoeTopology) -> np.ndarray:
    """Give a row's experts as int16 [T, L, K], K being the largest top-k of the stack, -1 where there is none."""
    layers = row.layer_experts(topology)
    width = max(layer.shape[1] for layer in layers)
    if all(layer.shape[1] == width for layer in layers):
        return row.experts.reshape(row.num_tokens, len(layers), width)
    padded = np.full((row.num_tokens, len(layers), width), -1, dtype=np.int16)
    for index, layer in enumerate(layers):
        padded[:, index, : layer.shape[1]] = layer
    return padded


def many_hot(experts_TLK: np.ndarray, num_experts: int) -> np.ndarray:
    """Give float32 [T, L, E]: 1 where the token uses the expert."""
    out = np.zeros((*experts_TLK.shape[:2], num_experts + 1), dtype=np.float32)
    np.put_along_axis(out, experts_TLK.astype(np.int64), 1, axis=2)  # -1 writes the last column, which is cut off
    return out[..., :num_experts]


def ids_of(row: SequenceRouting) -> np.ndarray:
    """Give a row's token ids as int64 [T]; -1, the unknown id, where the trace has none."""
    if row.token_ids is None:
        return np.full(row.num_tokens, -1, dtype=np.int64)
    return row.token_ids.astype(np.int64)


def hidden_of(row: SequenceRouting, topology: MoeTopology) -> np.ndarray:
    """Give the hidden states that a row's routers saw, float16 [T, L, H].

    Raises:
        DataError: if it was recorded without them.
    """
    if row.hidden is None:
        raise DataError(
            f"Sequence {row.sequence!r} has no hidden states, and the predictor foresees layers from them; record the "
            "trace with foregate collect --hidden, or measure another predictor."
        )
    return row.hidden.reshape(row.num_tokens, len(topology.layers_of(row.stack)), -1)


def group_of(row: SequenceRouting) -> str:
    """Name what may not be split between training and test: the row's group, else its sequence."""
    return f"sequence {row.sequence}" if row.group is None else f"group {row.group}"


def fingerprint(row: SequenceRouting) -> int:
    """Give 63 bits that tell a sequence by its tokens and experts, whatever its name and trace."""
    digest = hashlib.sha256(np.ascontiguousarray(row.experts, dtype=np.int16).tobytes())
    digest.update(ids_of(row).tobytes())
    return int.from_bytes(digest.digest()[:8], "little") >> 1


def statistics(rows: Sequence[SequenceRouting], topology: MoeTopology, num_experts: int) -> RoutingStatistics:
    """Count how often experts are used, overall and by token id (at most `MAX_TABLE_TOKENS`, the most frequent)."""
    counter: Counter[int] = Counter()  # a trace may be larger than memory
    for row in rows:
        ids = ids_of(row)
        counter.update(ids[ids >= 0].tolist())
    seen = np.array(sorted(counter), np.int64)
    counts = np.array([counter[token] for token in seen.tolist()], np.int64)
    order = np.argsort(-counts, kind="stable")[:MAX_TABLE_TOKENS]
    seen, counts = seen[order], counts[order]
    rank = np.argsort(seen)  # positions of the sorted ids
    num_layers = len(topology.layers_of(rows[0].stack))
    uses = np.zeros((len(seen), num_layers, num_experts), dtype=np.float32)
    total, num_tokens = np.zeros(num_layers * num_experts), 0
    for row in rows:
        entries, tokens = _entries(dense(row, topology), num_experts)
        total += np.bincount(entries, minlength=len(total))
        num_tokens += row.num_tokens
        if len(seen):
            row_ids = ids_of(row)
            places = rank[np.searchsorted(seen, row_ids, sorter=rank).clip(max=len(seen) - 1)]
            known = (seen[places] == row_ids)[tokens]
            np.add.at(uses.reshape(-1), places[tokens[known]] * len(total) + entries[known], np.float32(1))
    return RoutingStatistics(
        popularity_LE=(total / num_tokens).astype(np.float32).reshape(num_layers, num_experts),
        token_ids=seen.astype(np.int64),
        counts_S=counts.astype(np.float32),
        uses_SLE=uses,
    )


def _entries(experts_TLK: np.ndarray, num_experts: int) -> tuple[np.ndarray, np.ndarray]:
    """Give the flat (layer, expert) of every use, and the token that it belongs to."""
    flat = experts_TLK.astype(np.int64) + np.arange(experts_TLK.shape[1])[:, None] * num_experts
    used = experts_TLK >= 0
    return flat[used], np.nonzero(used)[0]
