"""Evaluating bundles: on what training has not seen, in and out of its domain, as a command with a table and a page."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from foregate.cli.evaluation_page import summary, write_evaluation
from foregate.cli.main import main
from foregate.collect.errors import BundleError, DataError, SettingError
from foregate.predictors import hub
from foregate.predictors.base import PredictorSpec
from foregate.predictors.baselines import TokenTable
from foregate.predictors.bundle import Bundle, seal
from foregate.predictors.sru_attention import SruAttentionSettings
from foregate.train import export as export_file
from foregate.train.data import TraceData
from foregate.train.evaluate import evaluate
from foregate.train.fit import FitSettings, fit
from foregate.train.module import PredictorModule

SMALL = SruAttentionSettings(embedding=16, hidden=32, attention=8, window=8, dropout=0.1, discount=0.8)
STEPS = FitSettings(max_steps=40, validate_steps=20, max_epochs=1000)


def categorised(write: Any, path: Path, names: list[str], **options: Any) -> Path:
    """Write a trace whose conversations have categories in turn."""
    write(path, **options)
    with np.load(path) as file:
        arrays = {**file, "category": np.array([names[int(c) % len(names)] for c in file["conversation"]])}
    np.savez(path, **arrays)
    return path


@pytest.fixture(scope="module")
def with_categories(write, tmp_path_factory) -> Path:
    return categorised(write, tmp_path_factory.mktemp("categorised") / "t.npz", ["law", "maths"], sequences=40)


@pytest.fixture(scope="module")
def bundle(with_categories, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("evaluated") / "bundle"
    data, module = TraceData(with_categories, batch_tokens=256), PredictorModule(SMALL, learning_rate=0.01)
    fit(data, module, out, STEPS)
    return out


@pytest.fixture(scope="module")
def report(bundle, with_categories) -> dict[str, Any]:
    return evaluate(bundle, with_categories, by="category")


def altered(bundle: Path, to: Path, **entries: Any) -> Path:
    """Copy a bundle with other entries on its card, sealed anew."""
    shutil.copytree(bundle, to)
    card = {name: value for name, value in Bundle.open(bundle).card.items() if name != "checksums"}
    seal(to, card | entries)
    return to


def test_the_card_says_what_an_evaluation_finds(bundle, report):
    card = Bundle.open(bundle).card
    metrics = card["metrics"]
    for name in ("recall_at_k", "recall_at", "baselines", "interval", "best_free", "beats_free", "verdict", "tokens"):
        assert report[name] == metrics[name], name
    horizon = report["horizons"]["token"]
    assert horizon["calibration"] == card["calibration"] == metrics["horizons"]["token"]["calibration"]
    assert horizon["calibration"]["temperature"] == card["temperature"]["token"] != 1
    assert card["beats_free"] is report["beats_free"] is True
    assert "beats what is free" in card["verdict"]
    assert metrics["horizons"]["token"]["free"][card["metrics"]["best_free"]] == horizon["free"][report["best_free"]]
    assert {entry["category"] for entry in metrics["horizons"]["token"]["by_category"]} <= {"law", "maths"}
    assert set(card["training"]["categories"]) <= {"law", "maths"}
    assert len(json.dumps(card)) < 60_000


def test_what_is_reported(report):
    assert set(report["latency_ms"]) == {"p50", "p99"}
    assert 0 < report["latency_ms"]["p50"] <= report["latency_ms"]["p99"]
    assert report["recovered_share"] is None  # nobody to ask
    assert report["domain"] == "in"
    assert report["left_out"] > 0
    assert f"{report['left_out']} other sequences of this trace" in report["domain_reason"]
    assert all(entry["in_training"] for entry in report["horizons"]["token"]["by_category"])
    json.dumps(report, allow_nan=False)


def test_other_traces_are_out_of_the_domain(bundle, write, tmp_path):
    other = write(tmp_path / "other.npz", sequences=6, seed=5)
    found = evaluate(bundle, other)
    assert (found["domain"], found["left_out"]) == ("out", 0)
    assert "no sequence of this trace" in found["domain_reason"]
    kin = categorised(write, tmp_path / "t.npz", ["law", "cooking"], sequences=6, seed=6)
    found = evaluate(bundle, kin, by="category")
    assert (found["domain"], found["domain_reason"]) == ("in", "training saw other sequences of t.npz")
    told = {entry["category"]: entry["in_training"] for entry in found["horizons"]["token"]["by_category"]}
    assert told == {"law": True, "cooking": False}
    strange = categorised(write, tmp_path / "u.npz", ["cooking"], sequences=6, seed=6)
    assert evaluate(bundle, strange)["domain_reason"] == "none of their categories was trained on"


def test_a_predictor_that_is_no_better_than_what_is_free_is_marked_so(with_categories, monkeypatch, tmp_path):
    data, written = TraceData(with_categories), {}
    data.setup()
    module = PredictorModule(SMALL)
    topology = data.header.topology
    spec = PredictorSpec(family="x", horizon="token", topology=topology, stack="causal", vocab_size=40)
    free = TokenTable(spec).fit(data.fitting_rows)
    module._network = SimpleNamespace(spec=spec)  # pyright: ignore
    monkeypatch.setattr(export_file, "write_bundle", lambda *_, **given: written.update(given["describe"](free)))
    export_file.export(module, data, tmp_path / "b")
    assert written["beats_free"] is written["metrics"]["beats_free"] is False
    assert "does not beat what is free" in written["verdict"]
    assert set(written["temperature"]) == {"token"}


def test_refusals(bundle, with_categories, write, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(bundle, broken)
    (broken / "predictor.onnx").write_bytes((broken / "predictor.onnx").read_bytes()[:-1] + b"x")
    with pytest.raises(BundleError, match="was altered: predictor"):
        evaluate(broken, with_categories)
    np.savez(tmp_path / "wide.npz", experts=np.arange(60, dtype=np.uint8).reshape(20, 3, 1), offsets=np.array([0, 20]))
    with pytest.raises(BundleError, match="3 causal layers x 60 experts"):
        evaluate(bundle, tmp_path / "wide.npz")
    for by, text in (("category", "no sequence of .* has one"), ("colour", "by must be category")):
        with pytest.raises(SettingError, match=text):
            evaluate(bundle, write(tmp_path / "plain.npz", sequences=4, seed=8), by=by)
    single = np.array([[[0, 7], [7, 1]], [[2, 3], [4, 5]]], np.uint8)
    np.savez(tmp_path / "none.npz", experts=single, offsets=np.array([0, 1, 2]))
    with pytest.raises(DataError, match="no sequence of two tokens"):
        evaluate(bundle, tmp_path / "none.npz")


def test_scores_that_are_nan_are_refused(bundle, write, tmp_path):
    broken = tmp_path / "nan"
    shutil.copytree(bundle, broken)
    model = onnx.load(broken / "predictor.onnx")
    weights = max(model.graph.initializer, key=lambda item: len(item.raw_data))
    weights.raw_data = np.full(len(weights.raw_data) // 4, np.nan, np.float32).tobytes()
    (broken / "predictor.onnx").write_bytes(model.SerializeToString())
    card = json.loads((broken / "card.json").read_text())
    del card["checksums"]
    seal(broken, card)
    with pytest.raises(BundleError, match="gives the score nan"):
        evaluate(broken, write(tmp_path / "t.npz", sequences=4, seed=8))


def test_bundles_without_a_temperature_or_categories_still_open(bundle, with_categories, tmp_path):
    old = altered(bundle, tmp_path / "old", temperature=None, training={})
    found = evaluate(old, with_categories, by="category")
    assert found["horizons"]["token"]["calibration"]["temperature"] == 1
    assert "in_training" not in found["horizons"]["token"]["by_category"][0]


def test_the_command(bundle, with_categories, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["evaluate", str(bundle), str(with_categories), "--by", "category"]
    assert main([*words, "--json", "--out", "page.html"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert 0 < values["recovered_share"] <= 1
    assert values["report"] == "page.html"
    assert main(words) == 0
    shown = capsys.readouterr().out
    for text in ("token table (best free)", "oracle", "LRU misses", "maths", "in-domain", values["verdict"][:40]):
        assert text in shown, text
    assert "beats nothing free" not in shown
    page = (tmp_path / "page.html").read_text()
    assert not re.findall(r"(?:src|href|xlink:href)\s*=\s*[\"'](?!#|data:)", page)
    assert not re.findall(r"@import|url\((?!#)", page)
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert data is not None
    assert json.loads(data[1])["horizons"] == values["horizons"]
    assert page.count("<svg") == 4
    for out, text in (("page.html", "exists already"), ("page", "must end in .html"), ("no/page.html", "is no folder")):
        assert main([*words, "--out", out]) == 2
        assert text in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]


def test_a_bundle_may_stand_on_a_hub(bundle, with_categories, capsys, monkeypatch):
    asked = []
    monkeypatch.setattr(hub, "from_hub", lambda name: asked.append(name) or Bundle.open(bundle))
    assert main(["evaluate", "hub:me/small@v1", str(with_categories), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["bundle"] == "hub:me/small@v1"
    assert asked == ["hub:me/small@v1"]


def test_notes_that_cast_doubt_are_told(report):
    notes = [{"kind": "remark", "sentence": "fine."}, {"kind": "tokens_apart", "sentence": "tokens ran together."}]
    lines = summary({**report, "trace": "t", "notes": notes})
    assert [line for line in lines if "Note" in line] == [
        "Note of the import, which these figures do not heed: tokens ran together."
    ]
    assert report["notes"] == []


def test_a_browser_shows_the_page(browser, report, tmp_path):
    values = {"bundle": "<b>", "trace": "</script><img src=x>", **report}
    write_evaluation(tmp_path / "page.html", values)
    browser.get((tmp_path / "page.html").as_uri())
    assert browser.get_log("browser") == []
    assert browser.find_element("class name", "lead").text == report["verdict"]
    assert json.loads(browser.find_element("id", "data").get_attribute("textContent")) == values
    width = browser.execute_script("return document.documentElement.clientWidth")
    figures = browser.find_elements("css selector", "figure svg")
    assert len(figures) == 4
    for figure in figures:
        box = figure.rect
        assert box["x"] >= 0
        assert 300 < box["width"] <= width - box["x"]
        assert box["height"] > 150
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    tables = browser.execute_script(
        "return [...document.querySelectorAll('table')].map(table => [...table.rows].map(row =>"
        " [...row.cells].map(cell => cell.innerText.trim())));"
    )
    assert tables[0][2][1] == f"{100 * report['recall_at_k']:.1f}"
    assert not [cell for rows in tables for row in rows for cell in row if cell in ("nan", "None", "inf")]
