"""Tokens of a trace for a replay, and what is known of them without an engine: the optimum, the best free policy.

Knows rows of traces and policies; no engines, bytes or time.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...collect.errors import DataError
from ...collect.topology import MoeTopology
from ...collect.trace import SequenceRouting, Trace
from ...predictors.bundle import Bundle
from ...predictors.rows import dense, fingerprint, ids_of, join_parts
from ..cache import ExpertCache
from ..policies.belady import Belady
from ..policies.registry import PolicySetting, make_policy
from ..replay import Event, replay
from .replay_arm import Token, needed_of

FREE = ("lru", "lfu", "lfru", "s3fifo", "layer_lru", "activation")  # without a predictor
CHOICE_TOKENS = 2000  # of training sequences, by which the best of those is chosen


def deal_tokens(trace: Trace, bundle: Bundle, wanted: int) -> tuple[list[Token], list[Token]]:
    """Give tokens that training saw, and `wanted` that it did not.

    Raises:
        DataError: if there are not as many.
    """
    known = bundle.training_sequences()
    seen: list[Token] = []
    fresh: list[Token] = []
    for row in join_parts(trace.rows(bundle.spec.stack)):
        target, enough = (seen, CHOICE_TOKENS) if fingerprint(row) in known else (fresh, wanted)
        if len(target) < enough:
            experts, ids = dense(row, trace.topology), ids_of(row)
            target += [Token(int(ids[t]), experts[t], t == 0) for t in range(min(len(ids), enough - len(target)))]
    if len(fresh) < wanted:
        raise DataError(
            f"{trace.path} has {len(fresh)} tokens that the predictor has not seen, and the rounds take {wanted}; give "
            "fewer --tokens or --rounds, or a predictor trained on fewer sequences."
        )
    return seen, fresh


def rows_of(tokens: Sequence[Token]) -> list[SequenceRouting]:
    """Make sequences of tokens again."""
    starts = [index for index, token in enumerate(tokens) if token.first or index == 0]
    rows = []
    for start, stop in zip(starts, [*starts[1:], len(tokens)], strict=True):
        part = tokens[start:stop]
        experts = np.stack([token.experts.reshape(-1) for token in part]).astype(np.int16)
        ids = np.array([token.token_id for token in part], np.int32)
        rows.append(SequenceRouting(sequence=str(start), stack="causal", experts=experts, token_ids=ids))
    return rows


def best_free(tokens: Sequence[Token], topology: MoeTopology, capacity: int) -> str:
    """Name the policy without a predictor that misses least on tokens."""
    events = events_of_tokens(tokens, topology)
    setting = PolicySetting(topology=topology, capacity=capacity)
    return min(FREE, key=lambda name: replay(events, capacity, make_policy(name, setting)).misses)


def optimum_of(tokens: Sequence[Token], topology: MoeTopology, capacity: int, warmup: int, per_round: int) -> list[int]:
    """Give Belady's misses in each round, who knows all of them."""
    by_token = [[needed for needed in needed_of(token, topology) if needed] for token in tokens]
    cache = ExpertCache(capacity, Belady([needed for events in by_token for needed in events]))
    misses = [sum(len(cache.event(needed, one_token=True).misses) for needed in events) for events in by_token]
    counted = misses[warmup:]
    return [sum(counted[start : start + per_round]) for start in range(0, len(counted), per_round)]


def events_of_tokens(tokens: Sequence[Token], topology: MoeTopology) -> list[Event]:
    """Give the events of tokens, in order."""
    return [Event(needed, True) for token in tokens for needed in needed_of(token, topology) if needed]
