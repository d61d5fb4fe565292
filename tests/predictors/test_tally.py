"""Every count of a tally against the slow obvious way, on scores with ties, small layers and dropped experts."""

from __future__ import annotations

import numpy as np
import pytest
from foregate.collect.errors import DataError
from foregate.collect.topology import MoeLayer, MoeTopology
from foregate.predictors.base import PredictorSpec
from foregate.predictors.metrics import RecallMeter
from foregate.predictors.tally import BUDGETS, Tally, bucket_names, buckets_of

SIZES, TOP_K = (8, 5, 8), (2, 1, 2)
TOPOLOGY = MoeTopology(
    layers=tuple(
        MoeLayer(stack="causal", block=i, num_experts=e, top_k=k)
        for i, (e, k) in enumerate(zip(SIZES, TOP_K, strict=True))
    )
)
SPEC = PredictorSpec(family="x", horizon="token", topology=TOPOLOGY, stack="causal", vocab_size=9)


def drawn(seed: int, tokens: int = 30) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Give scores with ties, true experts (one dropped), and which of them a cache missed."""
    rng = np.random.default_rng(seed)
    scores = rng.integers(0, 6, (tokens, 3, 8)).astype(np.float32) / 6
    experts = np.full((tokens, 3, 2), -1, np.int16)
    for layer, (size, k) in enumerate(zip(SIZES, TOP_K, strict=True)):
        scores[:, layer, size:] = 0
        experts[:, layer, :k] = np.argsort(rng.random((tokens, size)), axis=1)[:, :k]
    experts[4, 0, 1] = -1
    return scores, experts, rng.random(experts.shape) < 0.4


@pytest.fixture(scope="module")
def tally() -> Tally:
    made = Tally(SPEC)
    for key in (3, 0, 1):
        made.add(key, *drawn(key, 20 + 7 * key))
    return made


def named(scores: np.ndarray, number: int) -> list[int]:
    return np.argsort(-scores, kind="stable")[:number].tolist()


def tokens_of(keys: tuple[int, ...] = (0, 1, 3)):
    for key in keys:
        scores, experts, missed = drawn(key, 20 + 7 * key)
        for t in range(1, len(scores)):
            yield t, scores[t], [[int(e) for e in layer if e >= 0] for layer in experts[t]], experts[t], missed[t]


def slow(number_of, keys: tuple[int, ...] = (0, 1, 3)) -> tuple[list[float], list[float]]:
    """Give recall and precision of each layer when naming number_of(layer)."""
    recall, precision = [], []
    for layer in range(3):
        hits = used = said = 0
        for _, scores, experts, _, _ in tokens_of(keys):
            names = named(scores[layer][: SIZES[layer]], number_of(layer))
            hits += len(set(names) & set(experts[layer]))
            used += len(experts[layer])
            said += len(names)
        recall.append(hits / used)
        precision.append(hits / said)
    return recall, precision


@pytest.mark.parametrize(
    ("column", "number_of"),
    [
        ("1k", lambda layer: TOP_K[layer]),
        ("3k", lambda layer: 3 * TOP_K[layer]),
        ("3", lambda _: 3),
        ("8", lambda _: 8),
    ],
)
def test_recall_and_precision(tally, column, number_of):
    recall, precision = slow(number_of)
    assert tally.per_layer(column) == pytest.approx(recall)
    assert tally.recall(column) == pytest.approx(np.mean(recall))
    assert tally.precision(column) == pytest.approx(np.mean(precision))
    assert tally.recall(column, {1, 3}) == pytest.approx(np.mean(slow(number_of, (1, 3))[0]))


def test_it_agrees_with_the_meter_of_training(tally):
    meter = RecallMeter(8)
    for key in (0, 1, 3):
        meter.add(*drawn(key, 20 + 7 * key)[:2])
    assert tally.recall() == pytest.approx(meter.recall(TOP_K))
    assert tally.interval() == pytest.approx(meter.interval(TOP_K))
    low, high = tally.interval()
    assert low < tally.recall() < high


def test_whole_paths(tally):
    for factor in (1, 2):
        found = [
            all(set(experts[i]) <= set(named(scores[i][: SIZES[i]], factor * TOP_K[i])) for i in range(3))
            for _, scores, experts, _, _ in tokens_of()
        ]
        assert tally.whole_path()[f"{factor}k"] == pytest.approx(np.mean(found))


def test_positions(tally):
    hits, used = np.zeros((4, 3)), np.zeros((4, 3))
    for t, scores, experts, _, _ in tokens_of():
        bucket = next(i for i, last in enumerate((1, 4, 16, 64)) if t <= last)
        for layer in range(3):
            hits[bucket, layer] += len(set(named(scores[layer], TOP_K[layer])) & set(experts[layer]))
            used[bucket, layer] += len(experts[layer])
    assert tally.positions() == pytest.approx((hits / used).mean(1).tolist())
    assert bucket_names(4) == ["1", "2-4", "5-16", "17-64"]
    assert buckets_of(np.array([1, 2, 4, 5, 16, 17, 64, 65, 256, 257])).tolist() == [0, 1, 1, 2, 2, 3, 3, 4, 4, 5]


def test_budgets_over_all_layers(tally):
    for share in BUDGETS:
        number, hits, used = round(share * sum(TOP_K)), 0.0, 0
        for _, scores, experts, _, _ in tokens_of():
            limit = np.sort(scores.ravel())[-number]
            room = (number - (scores > limit).sum()) / (scores == limit).sum()
            true = [scores[layer, e] for layer in range(3) for e in experts[layer]]
            hits += sum(1.0 if score > limit else room * (score == limit) for score in true)
            used += len(true)
        assert tally.budgets()[f"{share:.0%}"] == pytest.approx(hits / used)


def test_misses(tally):
    misses = hits = 0
    for _, scores, _, experts, missed in tokens_of():
        for layer in range(3):
            names = named(scores[layer], TOP_K[layer])
            wanted = [int(e) for e, absent in zip(experts[layer], missed[layer], strict=True) if absent and e >= 0]
            misses += len(wanted)
            hits += len(set(wanted) & set(names))
    assert tally.on_misses() == (misses, pytest.approx(hits / misses))
    bare = Tally(SPEC)
    bare.add(0, *drawn(0)[:2])
    assert bare.on_misses() == (0, None)


def test_the_gain_is_paired_by_sequence():
    """Sequences differ much and the two differ little: only pairs can tell."""
    better, worse = Tally(SPEC), Tally(SPEC)
    rng = np.random.default_rng(0)
    for key in range(20):
        _, experts, _ = drawn(key, 60)
        easy = rng.random() < 0.5
        scores = np.zeros((60, 3, 8), np.float32)
        if easy:
            np.put_along_axis(scores, np.maximum(experts, 0).astype(np.int64), 1, axis=2)
        worse.add(key, scores, experts)
        once = scores.copy()
        np.put_along_axis(once[:6], np.maximum(experts[:6], 0).astype(np.int64), 2, axis=2)
        better.add(key, once, experts)
    gain, (low, high) = better.gain(worse)
    assert 0 < low < gain < high
    assert better.interval()[0] < worse.recall()  # apart they overlap
    assert worse.gain(better)[1][1] < 0
    assert better.gain(better) == (0, (0, 0))


def test_tokens_without_experts_and_sequences_without_tokens():
    made = Tally(SPEC)
    with pytest.raises(DataError, match="at least one sequence"):
        made.recall()
    scores, experts, _ = drawn(0)
    experts[:, 1] = -1
    made.add(0, scores, experts)
    made.add(1, scores[:1], experts[:1])
    assert made.per_layer()[1] is None
    assert made.recall() == pytest.approx(np.mean([made.per_layer()[0], made.per_layer()[2]]))
    assert made.whole_path()["2k"] > 0
