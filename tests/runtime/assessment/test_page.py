"""The page: everything is escaped and inside the file, and a real browser shows what the values say."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from foregate.collect.topology import MoeTopology
from foregate.collect.trace import Trace
from foregate.runtime.assessment.assess import AssessConfig, assess
from foregate.runtime.assessment.names import rate_of
from foregate.runtime.assessment.page import write_assessment
from foregate.runtime.hardware import HardwareProfile
from foregate.runtime.time_model import ModelSizes


@pytest.fixture(scope="module")
def values(random_rows: Callable[..., Any], npz: Callable[..., Trace], box: HardwareProfile) -> dict[str, Any]:
    topology = MoeTopology.uniform(4, 16, 2)
    rows = random_rows(topology, 16, 30)
    experts = np.concatenate([row.experts for row in rows]).reshape(-1, 4, 2).astype(np.uint8)
    trace = npz(experts, [30] * 16, token_ids=np.concatenate([row.token_ids for row in rows]))
    return assess(trace, AssessConfig(), box, ModelSizes(expert_bytes=1e6, dense_bytes=4e6))


@pytest.fixture(scope="module")
def page(values: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "assessment.html"
    write_assessment(path, values)
    return path


def shown(browser: Any, path: Path) -> dict[str, list[list[str]]]:
    """Open a page and give the cells of its tables by caption."""
    browser.get(path.as_uri())
    found = browser.execute_script(
        "return [...document.querySelectorAll('table')].map(table => [table.caption ? table.caption.innerText : '',"
        " [...table.rows].map(row => [...row.cells].map(cell => cell.innerText.trim()))]);"
    )
    return dict(found)


def test_the_page_needs_nothing_from_outside(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert not re.findall(r"(?:src|href|xlink:href)\s*=\s*[\"'](?!#|data:)", text)
    assert not re.findall(r"@import|url\((?!#)", text)


def test_all_text_is_escaped(values: dict[str, Any], tmp_path: Path) -> None:
    hostile = copy.deepcopy(values)
    for name in ("model", "trace"):
        hostile[name] = "</script><script>alert(1)</script>"
    hostile["verdict"]["sentence"] = "<img src=x onerror=alert(2)>"
    write_assessment(tmp_path / "page.html", hostile)
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "<script>alert" not in text
    assert "<img" not in text
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert data is not None
    assert json.loads(data[1]) == hostile


def test_a_browser_shows_the_verdict_and_complains_of_nothing(browser: Any, page: Path, values: dict[str, Any]) -> None:
    browser.get(page.as_uri())
    lead = browser.find_element("class name", "lead")
    assert lead.is_displayed()
    assert lead.text == values["verdict"]["sentence"]
    assert browser.get_log("browser") == []
    assert json.loads(browser.find_element("id", "data").get_attribute("textContent")) == values


def test_every_figure_is_drawn_inside_the_page(browser: Any, page: Path) -> None:
    browser.get(page.as_uri())
    width = browser.execute_script("return document.documentElement.clientWidth")
    figures = browser.find_elements("css selector", "figure")
    assert len(figures) == 7
    for figure in figures:
        box = browser.execute_script(
            "const box = arguments[0].querySelector('svg').getBoundingClientRect();"
            "return [box.x, box.width, box.height, arguments[0].querySelectorAll('svg path').length];",
            figure,
        )
        assert box[0] >= 0
        assert 300 < box[1] <= width - box[0]
        assert box[2] > 150
        assert box[3] > 20  # axes, lines and the glyphs of its labels
        assert figure.find_element("css selector", "figcaption").text
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width


def test_the_tables_say_what_the_values_say(browser: Any, page: Path, values: dict[str, Any]) -> None:
    tables = shown(browser, page)
    gains = next(rows for caption, rows in tables.items() if caption.startswith("Gains over LRU"))
    assert [row[1] for row in gains[1:]] == [f"{values['gains'][name]:.2f} x" for name in ("prefetch", "cache", "both")]
    assert gains[3][4] == rate_of(values["gains"]["tokens_per_s"]["limit"])
    curves = next(rows for caption, rows in tables.items() if caption.startswith("Miss rate by"))
    assert len(curves) == 1 + len(values["curves"]["policies"])
    for row, policy in zip(curves[1:], values["curves"]["policies"].values(), strict=True):
        assert row[1:-1] == [f"{100 * rate:.1f} %" for rate in policy["miss_rate"]]
    assert [cell.split()[0] for cell in curves[0][1:-1]] == [str(held) for held in values["curves"]["capacities"]]
    overlap = next(rows for caption, rows in tables.items() if caption.startswith("Overlap"))
    assert [row[1] for row in overlap[1:]] == [f"{100 * item['overlap']:.1f} %" for item in values["overlap"]]
    signals = next(rows for caption, rows in tables.items() if caption.startswith("Recall"))
    assert [row[1] for row in signals[1:]] == [
        f"{100 * item['recall']:.1f} %" for item in values["signals"]["causal"]["signals"].values()
    ]
    load = next(rows for caption, rows in tables.items() if caption.startswith("Balance"))
    assert [row[2] for row in load[1:]] == [f"{layer['entropy']:.3f}" for layer in values["load"]["layers"]]
    hot = next(rows for caption, rows in tables.items() if caption == "Share served by the hottest.")
    assert [row[1] for row in hot[1:]] == [f"{100 * item['held_out']:.1f} %" for item in values["coverage"]]
    assert not [cell for rows in tables.values() for row in rows for cell in row if cell in ("nan", "None", "inf")]


def test_rates_have_three_digits_and_no_exponent() -> None:
    assert [rate_of(rate) for rate in (0.12345, 12.345, 999.4, 999.6, 14_900.0)] == [
        "0.123",
        "12.3",
        "999",
        "1,000",
        "14,900",
    ]


def test_a_page_without_times_ids_or_signals_is_shown_too(browser: Any, npz: Any, tmp_path: Path) -> None:
    trace = npz(np.array([[[0]], [[1]], [[0]], [[3]]], np.uint8), [4])
    write_assessment(tmp_path / "page.html", assess(trace, AssessConfig(capacity=2)))
    tables = shown(browser, tmp_path / "page.html")
    assert browser.get_log("browser") == []
    assert len(browser.find_elements("css selector", "figure svg")) == 5
    assert tables["Repeated text, share of the tokens."][1] == ["causal", "routing", "-", "-", "-", "0.0 %", "0.0 %"]
