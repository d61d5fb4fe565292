"""What a report says of predictors whose worth is known: the oracle, the free ones, and one that boasts."""

from __future__ import annotations

import json
from collections import OrderedDict
from dataclasses import replace

import numpy as np
import pytest
from foregate.collect.trace import SequenceRouting, Trace
from foregate.predictors.base import PredictorSpec
from foregate.predictors.baselines import BASELINES, LayerPair, PreviousToken, TokenTable
from foregate.predictors.rows import dense, join_parts, many_hot
from foregate.predictors.scoring import measure, own_k
from foregate.predictors.tally import Tally
from foregate.train.misses import capacity_of, missed_by_lru
from foregate.train.report import headline, measured, temperatures_of

FIGURES = {
    "recall_at_k",
    "interval",
    "recall_at",
    "precision_at",
    "per_layer",
    "positions",
    "budget",
    "whole_path",
    "on_misses",
}


@pytest.fixture(scope="module")
def rows(trace) -> list[SequenceRouting]:
    return list(join_parts(Trace.open(trace)))


@pytest.fixture(scope="module")
def spec(trace) -> PredictorSpec:
    topology = Trace.open(trace).topology
    return PredictorSpec(family="x", horizon="token", topology=topology, stack="causal", vocab_size=40)


def test_a_free_predictor_does_not_beat_itself(rows, spec):
    told = measured(TokenTable(spec).fit(rows[:12]), rows[12:], rows[:12])
    assert list(told) == ["token"]
    report = told["token"]
    assert report["best_free"] == "token_table"
    assert report["gain"] == 0
    assert report["beats_free"] is False
    assert "does not beat what is free" in report["verdict"]
    assert {key: report[key] for key in FIGURES} == report["free"]["token_table"]
    json.dumps(told, allow_nan=False)


def test_every_free_predictor_is_measured_as_anybody_is(rows, spec):
    report = measured(PreviousToken(spec).fit(rows[:12]), rows[12:], rows[:12])["token"]
    assert list(report["free"]) == list(report["baselines"])
    assert set(report["baselines"]) == {"random", "popularity", "previous_token", "token_table"}
    for name, figures in report["free"].items():
        free = BASELINES[name](spec).fit(rows[:12])
        meter = measure(free, rows[12:])
        assert figures["recall_at_k"] == report["baselines"][name] == pytest.approx(meter.recall(own_k(free)), abs=1e-5)
        assert figures["interval"] == pytest.approx(meter.interval(own_k(free)), abs=0.02)  # drawn in another order
    assert set(report["oracle"]) == FIGURES
    assert report["oracle"]["recall_at_k"] == report["oracle"]["whole_path"]["1k"] == 1
    assert report["oracle"]["recall_at"]["1"] == report["oracle"]["budget"]["50%"] == 0.5
    assert report["recall_at"]["2"] == report["recall_at"]["1k"] == report["recall_at_k"]


def test_the_oracle_beats_what_is_free(rows, spec):
    later = sorted(rows[12:], key=lambda row: -row.num_tokens)
    report = measured(BASELINES["oracle"](spec).fit(later), rows[12:], rows[:12])["token"]
    assert report["beats_free"] is True
    low, high = report["gain_interval"]
    assert 0 < low < report["gain"] < high
    assert "beats what is free" in report["verdict"]
    assert report["calibration"]["expected_error"] == 0


def test_layers_are_measured_beside_what_is_free_within_the_token(rows, spec):
    told = measured(LayerPair(replace(spec, horizon="layer")).fit(rows[:12]), rows[12:], rows[:12])
    assert list(told) == ["layer", "token"]
    layer = told["layer"]
    assert set(layer["baselines"]) == {"random", "popularity", "previous_token", "token_table", "layer_pair"}
    assert layer["per_layer"][0] is None
    assert layer["free"]["token_table"]["per_layer"][1] == told["token"]["free"]["token_table"]["per_layer"][1]
    assert layer["recall_at_k"] == layer["baselines"]["layer_pair"]
    assert layer["oracle"]["budget"]["100%"] == 1
    assert "layer_pair" not in told["token"]["baselines"]
    first = headline(told)
    assert first["recall_at_k"] == told["token"]["recall_at_k"]
    assert first["verdict"] == layer["verdict"]


def test_rows_without_others_are_crossed_and_paired(rows, spec):
    report = measured(TokenTable(spec).fit(rows[:12]), rows[12:], None)["token"]
    assert set(report["baselines"]) == {"random", "popularity", "previous_token", "token_table"}
    halves = [[row for row in rows[12:] if (int(row.group or 0) % 2 == 0) == even] for even in (True, False)]
    meter = measure(TokenTable(spec).fit(halves[0]), halves[1])
    meter.counts += measure(TokenTable(spec).fit(halves[1]), halves[0]).counts
    assert report["baselines"]["token_table"] == pytest.approx(meter.recall([2, 2]), abs=1e-5)
    alone = measured(TokenTable(spec).fit(rows[:12]), rows[12:13], None)["token"]
    assert (alone["baselines"], alone["best_free"], alone["beats_free"]) == ({}, None, False)
    assert "two groups" in alone["verdict"]


def test_one_sequence_proves_nothing(rows, spec):
    report = measured(BASELINES["oracle"](spec).fit(rows[12:13]), rows[12:13], rows[:12])["token"]
    assert report["gain"] > 0.1
    assert report["beats_free"] is False


def test_categories(rows, spec):
    marked = [replace(row, category="ab"[index % 2]) for index, row in enumerate(rows)]
    predictor = TokenTable(spec).fit(rows[:12])
    report = measured(predictor, marked[12:], rows[:12], by_category=True)["token"]
    assert [entry["category"] for entry in report["by_category"]] == ["a", "b"]
    for entry in report["by_category"]:
        kept = [row for row in marked[12:] if row.category == entry["category"]]
        alone = measured(predictor, kept, rows[:12])["token"]
        assert entry["sequences"] == len(kept)
        assert entry["tokens"] == sum(row.num_tokens for row in kept)
        assert entry["recall_at_k"] == alone["recall_at_k"]
        assert entry["interval"] == alone["interval"]
        assert entry["baselines"] == alone["baselines"]


class Boastful(PreviousToken):
    """Says what the token table says, with its logits doubled."""

    name = "boastful"

    def _mean(self, previous: np.ndarray) -> np.ndarray:
        odds = np.clip(super()._mean(previous), 1e-4, 1 - 1e-4)
        return (odds**2 / (odds**2 + (1 - odds) ** 2)).astype(np.float32)


def test_the_temperature_of_validation_mends_what_is_boasted(rows, spec):
    predictor = Boastful(spec).fit(rows[:8])
    heat = temperatures_of(predictor, rows[8:12])
    assert list(heat) == ["token"]
    assert heat["token"] > 1.3
    curve = measured(predictor, rows[12:], rows[:12], temperatures=heat)["token"]["calibration"]
    assert curve["temperature"] == heat["token"]
    assert curve["after"]["expected_error"] < 0.8 * curve["expected_error"]


def test_misses_are_those_of_a_plain_lru(rows, spec):
    capacity, held = capacity_of(spec), OrderedDict()
    assert capacity == 4
    for row, found in zip(rows, missed_by_lru(rows, spec, capacity), strict=True):
        assert found is not None
        for token, layers in enumerate(dense(row, spec.topology).tolist()):
            for layer, experts in enumerate(layers):
                assert found[token, layer].tolist() == [(layer, expert) not in held for expert in experts]
                for expert in sorted(experts):
                    held[layer, expert] = None
                    held.move_to_end((layer, expert))
                while len(held) > capacity:
                    held.popitem(last=False)
    few = missed_by_lru(rows, spec, capacity, most_accesses=100)
    assert few[0] is not None
    assert few[-1] is None


def test_recall_of_misses_counts_only_what_was_absent(rows, spec):
    capacity = capacity_of(spec)
    missed = missed_by_lru(rows[12:], spec, capacity)
    predictor = TokenTable(spec).fit(rows[:12])
    report = measured(predictor, rows[12:], rows[:12])["token"]
    hits = misses = 0
    for row, absent in zip(rows[12:], missed, strict=True):
        experts = dense(row, spec.topology)
        assert absent is not None
        for t in range(1, row.num_tokens):
            scores = predictor.sequence(row.token_ids[t : t + 1], many_hot(experts[t : t + 1], 8))[0]
            for layer in range(2):
                names = np.argsort(-scores[layer], kind="stable")[:2]
                wanted = experts[t, layer][absent[t, layer]]
                misses += len(wanted)
                hits += int(np.isin(wanted, names).sum())
    assert report["on_misses"] == {
        "capacity": 4,
        "misses": misses,
        "recall_at_k": pytest.approx(hits / misses, abs=1e-5),
    }


@pytest.mark.parametrize(("low", "beats"), [(-0.001, False), (0.0, False), (0.001, True)])
def test_a_gain_counts_where_its_whole_interval_does(low, beats, rows, spec, monkeypatch):
    monkeypatch.setattr(Tally, "gain", lambda *_: (0.01, (low, 0.02)))
    report = measured(PreviousToken(spec).fit(rows[:12]), rows[12:], rows[:12])["token"]
    assert report["beats_free"] is beats
    assert report["gain_interval"] == [low, 0.02]
