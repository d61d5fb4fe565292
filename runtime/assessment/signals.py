"""What the best free signal names: of all experts, and of those that a cache misses. Knows predictors and caches.

Sequences are split by whole group: every fifth group is measured, the others are what a signal is fitted on. Demand
recall is that of `predictors/metrics.py`. Covered misses are counted on the miss stream of a cache that sees the same
tokens one by one: of the experts that are absent when an event starts, those with the best scores are fetched, as many
as there is room for, whatever token and layer they are for. A previous token's experts are mostly resident still, so
that a good demand recall may cover few misses.
"""

# T tokens, L MoE layers of a stack, K experts per token, E experts of the largest layer

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import numpy as np

from ...collect.topology import MoeTopology, Stack
from ...collect.trace import SequenceRouting
from ...predictors.base import PredictorSpec
from ...predictors.baselines import BASELINES
from ...predictors.metrics import RecallMeter
from ...predictors.rows import dense, group_of
from ...predictors.scoring import own_k, scores_of
from ..cache import ExpertCache
from ..policies.base import EvictionPolicy
from .load import layers_with_experts

FETCHED_PER_MISS = (0.125, 0.25, 0.5, 1.0, 2.0, 4.0)
SIGNALS = ("popularity", "previous_token", "token_table", "layer_pair")
ONE_IN = 5  # groups: one is measured, the others are fitted on
BY_IDS = ("token_table",)  # signals that need token ids


def split(rows: Sequence[SequenceRouting]) -> tuple[list[SequenceRouting], list[SequenceRouting]]:
    """Give (rows to fit on, rows to measure): every fifth group is measured, with two to four groups the last."""
    groups = list(dict.fromkeys(map(group_of, rows)))
    if len(groups) < 2:
        return list(rows), []
    measured = set(groups[ONE_IN - 1 :: ONE_IN] or groups[-1:])
    return [row for row in rows if group_of(row) not in measured], [row for row in rows if group_of(row) in measured]


def resident_before(
    rows: Sequence[SequenceRouting], topology: MoeTopology, cache: ExpertCache
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Serve rows of one stack token by token and note what every event found.

    Returns:
        per row (bool [T, L, E]: resident when the event started, bool [T, L, E]: needed and absent)
    """
    found = []
    for row in rows:
        layers = topology.layers_of(row.stack)
        experts = dense(row, topology)
        resident = np.zeros((len(experts), len(layers), topology.max_experts), bool)
        missed = np.zeros_like(resident)
        ids = topology.ids
        for token in range(len(experts)):
            for index, layer in enumerate(layers):
                needed = sorted(
                    {topology.flat(layer, expert) for expert in experts[token, index].tolist() if expert >= 0}
                )
                if not needed:
                    continue
                low, high = topology.offsets[layer : layer + 2]
                resident[token, index, [flat - low for flat in cache.resident if low <= flat < high]] = True
                for flat in cache.event(needed, one_token=True).misses:
                    missed[token, index, ids[flat].expert] = True
        found.append((resident, missed))
    return found


class Candidates(NamedTuple):
    """What a signal says of the absent experts of the measured tokens, each sequence's first token left out."""

    scores: np.ndarray
    """float32 [C], the signal's score of every absent expert that it does not rule out (score 0)."""
    useful: np.ndarray
    """bool [C], whether the token needed it."""
    misses: int
    """Needed and absent experts, those that were ruled out too."""
    tokens: int
    """Tokens counted."""


def candidates(scores_TLE: np.ndarray, resident_TLE: np.ndarray, missed_TLE: np.ndarray) -> Candidates:
    """Give the candidates of one sequence."""
    scores, missed = scores_TLE[1:], missed_TLE[1:]
    absent = ~resident_TLE[1:] & (scores > 0)
    return Candidates(scores[absent], missed[absent], int(missed.sum()), len(scores))


def coverage_curve(found: Sequence[Candidates], per_miss: Sequence[float] = FETCHED_PER_MISS) -> list[dict[str, Any]]:
    """Give the share of the misses that is covered when so many experts are fetched per miss, best scores first.

    Returns:
        per ratio {"fetched_per_miss" (fewer than asked for where the candidates end), "covered_misses"}; empty where
        nothing was missed.
    """
    misses = sum(item.misses for item in found)
    if not misses:
        return []
    scores = np.concatenate([item.scores for item in found])
    useful = np.concatenate([item.useful for item in found])
    # Ties count with their mean: no order among equal scores is better than another.
    order = np.argsort(-scores, kind="stable")
    _, starts, sizes = np.unique(-scores[order], return_index=True, return_counts=True)
    caught = np.add.reduceat(useful[order].astype(np.int64), starts) if len(starts) else np.zeros(0, np.int64)
    fetched = np.concatenate([[0], np.cumsum(sizes)])
    covered = np.concatenate([[0], np.cumsum(caught)])
    curve = []
    for ratio_asked in per_miss:
        count = min(ratio_asked * misses, float(fetched[-1]))
        share = float(np.interp(count, fetched, covered)) / misses
        curve.append({"fetched_per_miss": count / misses, "covered_misses": share})
    return curve


def free_signals(
    rows: Sequence[SequenceRouting],
    topology: MoeTopology,
    stack: Stack,
    vocab_size: int | None,
    capacity: int,
    policy: Callable[[], EvictionPolicy] | None,
    most_accesses: int,
    left_out: Collection[str] = (),
) -> dict[str, Any]:
    """Measure the free signals on one stack.

    Args:
        rows: all of the stack.
        vocab_size: of the model; None where unknown.
        capacity: of the cache whose misses are to be covered.
        policy: makes that cache's policy; None where the rows may not be replayed, and nothing is covered.
        most_accesses: that the miss stream is measured on.
        left_out: signals that the notes of the trace forbid.

    Returns:
        {"fitted_on", "measured_on" (rows), "chance", "fetched_per_miss" (asked for), "left_out", "signals": {NAME:
        {"recall", "interval", "coverage": see `coverage_curve`}}, "reason"}; signals is empty, with the reason, where
        the rows have one group only, no sequence of two tokens to measure on, or experts in other layers than those
        that were fitted on.
    """
    fitted, measured = split(rows)
    sizes = [topology.layers[index] for index in topology.layers_of(stack)]
    found: dict[str, Any] = {
        "fitted_on": len(fitted),
        "measured_on": len(measured),
        "chance": float(np.mean([layer.top_k / layer.num_experts for layer in sizes])),
        "fetched_per_miss": list(FETCHED_PER_MISS),
        "left_out": list(left_out),
        "signals": {},
        "reason": None,
    }
    if not any((row.num_tokens > 1 and (row.experts[1:] >= 0).any()) for row in measured):
        found["reason"] = "signals need two groups of sequences, and one of at least two tokens to measure on"
        return found
    if not layers_with_experts(measured, topology) <= layers_with_experts(fitted, topology):
        found["reason"] = "the sequences to measure signals on have experts in layers where those to fit on have none"
        return found
    with_ids = all(row.token_ids is not None for row in rows)
    ordered = sorted(measured, key=lambda row: -row.num_tokens)
    streams: dict[int, Any] = {}
    if policy is not None:
        warm = fitted[-1:]  # else the misses of a cold start, which no signal is asked about, would be among them
        streamed = [*warm, *_first(measured, most_accesses)]
        served = resident_before(streamed, topology, ExpertCache(capacity, policy()))
        streams = dict(zip(map(id, streamed), served, strict=True))
    for name in SIGNALS:
        if name in left_out or (name in BY_IDS and not with_ids) or (name == "layer_pair" and len(sizes) < 2):
            continue
        spec = PredictorSpec(
            family=name,
            horizon="layer" if name == "layer_pair" else "token",
            topology=topology,
            stack=stack,
            vocab_size=vocab_size or 0,
        )
        found["signals"][name] = _measure(BASELINES[name](spec).fit(fitted), ordered, streams)
    return found


def _measure(predictor: Any, ordered: list[SequenceRouting], streams: dict[int, Any]) -> dict[str, Any]:
    k = own_k(predictor)
    meter = RecallMeter(predictor.spec.shape[1])
    found = []
    for item in scores_of(predictor, ordered):
        scores = item.by_horizon[predictor.spec.horizon]
        meter.add(scores, item.truth(predictor.spec.horizon))
        if id(item.row) in streams:
            resident, missed = (mask[:, :, : scores.shape[2]] for mask in streams[id(item.row)])
            found.append(candidates(scores, resident, missed))
    return {"recall": meter.recall(k), "interval": list(meter.interval(k)), "coverage": coverage_curve(found)}


def _first(rows: list[SequenceRouting], most_accesses: int) -> list[SequenceRouting]:
    taken, total = [], 0
    for row in rows:
        if taken and total + row.experts.size > most_accesses:
            break
        taken.append(row)
        total += row.experts.size
    return taken
