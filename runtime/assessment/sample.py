"""Which sequences are looked at: all, or whole ones drawn with a seed. Knows rows of a trace; knows no statistics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...collect.errors import SettingError, TraceError
from ...collect.topology import MoeTopology
from ...collect.trace import SequenceRouting, Trace


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Hold the rows that are looked at, in the order of the trace."""

    rows: list[SequenceRouting]
    """Whole sequences, one row per sequence and stack, none of them empty."""
    topology: MoeTopology
    """MoE layers of the trace."""
    total_sequences: int
    """Sequences of the trace that have tokens."""
    total_tokens: int
    """Their tokens, summed over stacks."""
    seed: int
    """Seed of the draw."""

    @property
    def num_sequences(self) -> int:
        """Sequences that are looked at."""
        return len({row.sequence for row in self.rows})

    @property
    def num_tokens(self) -> int:
        """Their tokens, summed over stacks."""
        return sum(row.num_tokens for row in self.rows)

    def describe(self) -> str:
        """Say in words what was drawn."""
        if self.num_sequences == self.total_sequences:
            return f"all {self.total_sequences} sequences ({self.num_tokens} tokens)"
        tokens = f"{self.num_tokens} of {self.total_tokens} tokens"
        return f"{self.num_sequences} of {self.total_sequences} sequences, drawn at random ({tokens})"

    def to_json(self) -> dict[str, Any]:
        """Say what was drawn from what."""
        return {
            "sequences": self.num_sequences,
            "tokens": self.num_tokens,
            "of_sequences": self.total_sequences,
            "of_tokens": self.total_tokens,
            "drawn": "all" if self.num_sequences == self.total_sequences else f"at random, seed {self.seed}",
        }


def draw(trace: Trace, *, sequences: int | None, most_accesses: int, seed: int = 0) -> Sample:
    """Draw whole sequences of a trace, which is read twice so that only those drawn are held.

    Args:
        sequences: how many; None draws until `most_accesses` is reached, at least one.
        most_accesses: tokens x experts per token that are enough where no number is given.

    Raises:
        SettingError: if the number is not positive.
        TraceError: if the trace has no tokens.
    """
    if sequences is not None and sequences < 1:
        raise SettingError(f"sequences must be at least 1, got {sequences}.")
    accesses, tokens = Counter[str](), 0
    for row in trace:
        if row.num_tokens:
            accesses[row.sequence] += row.experts.size
            tokens += row.num_tokens
    if not accesses:
        raise TraceError(f"{trace.path} has no tokens to assess; record or import the trace again.")
    names = list(accesses)
    order = [names[index] for index in np.random.default_rng(seed).permutation(len(names))]
    chosen = set(order[:sequences] if sequences is not None else _up_to(order, accesses, most_accesses))
    rows = [row for row in trace.sequences() if row.sequence in chosen and row.num_tokens]
    return Sample(rows=rows, topology=trace.topology, total_sequences=len(names), total_tokens=tokens, seed=seed)


def fewer(sample: Sample, most_accesses: int) -> Sample:
    """Draw whole sequences of a sample until `most_accesses` is reached, at least one."""
    accesses = Counter[str]()
    for row in sample.rows:
        accesses[row.sequence] += row.experts.size
    names = list(accesses)
    order = [names[index] for index in np.random.default_rng(sample.seed).permutation(len(names))]
    chosen = set(_up_to(order, accesses, most_accesses))
    return Sample(
        rows=[row for row in sample.rows if row.sequence in chosen],
        topology=sample.topology,
        total_sequences=sample.total_sequences,
        total_tokens=sample.total_tokens,
        seed=sample.seed,
    )


def by_stack(rows: Iterable[SequenceRouting]) -> dict[str, list[SequenceRouting]]:
    """Sort rows by their stack."""
    found: dict[str, list[SequenceRouting]] = {}
    for row in rows:
        found.setdefault(row.stack, []).append(row)
    return found


def _up_to(order: Sequence[str], accesses: Counter[str], most: int) -> list[str]:
    """Take names until the accesses reach `most`."""
    if sum(accesses.values()) <= most:
        return list(order)
    taken, total = [], 0
    for name in order:
        if taken and total + accesses[name] > most:
            continue  # a long sequence is passed over, shorter ones may still fit
        taken.append(name)
        total += accesses[name]
    return taken
