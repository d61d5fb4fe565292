"""Arms, the limit and the report."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch
from foregate.collect import tiny_models
from foregate.runtime import load
from foregate.runtime.bench.arms import Arm, Generation, run_arms
from foregate.runtime.bench.limit import PROBE_BLOCKS, LinkProbe, limit_s
from foregate.runtime.clock import ManualClock
from foregate.runtime.pack import pack
from foregate.runtime.replay import Event
from foregate.runtime.report import heat_map, hit_rates, write_report


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("bench")
    resident = tiny_models.build("qwen3_moe")
    resident.save_pretrained(folder / "model")
    pack(folder / "model", folder / "store")
    resident.set_experts_implementation("grouped_mm")
    offloaded = load(folder / "store", slots=0.5)
    yield resident, offloaded
    offloaded.foregate.close()


def test_arms_take_turns_and_sample_equal_texts(models) -> None:
    resident, offloaded = models
    arms = {"resident": Arm(model=resident), "lru": Arm(model=offloaded)}
    prompts = [torch.arange(5, 15)[None], torch.arange(30, 37)[None]]
    order: list[tuple[str, int]] = []
    run_arms(arms, prompts, new_tokens=6, passes=3, seed=3, progress=lambda *step: order.append(step))
    assert order == [("resident", 0), ("lru", 0), ("lru", 1), ("resident", 1), ("resident", 2), ("lru", 2)]
    assert arms["resident"].texts == arms["lru"].texts
    assert [len(ids) for ids in arms["lru"].texts[0]] == [6, 6]
    assert len(arms["lru"].tokens_per_s) == 3


def test_rates_come_from_the_clock() -> None:
    arm = Arm(model=None, passes=[[Generation((1, 2, 3), 0.5, 1.0), Generation((4, 5, 6), 0.3, 0.2)]])
    assert arm.seconds == 2.0
    assert arm.tokens_per_s == [3.0]
    assert arm.ttft_s == pytest.approx(0.4)
    assert arm.tpot_s == pytest.approx(0.3)


def test_first_token_is_timed_apart_from_the_rest(models) -> None:
    class Ticking(ManualClock):
        def now(self) -> float:
            self.advance(1.0)
            return super().now()

    arms = {"resident": Arm(model=models[0])}
    run_arms(arms, [torch.arange(5, 9)[None]], new_tokens=4, passes=1, clock=Ticking())
    (generation,) = arms["resident"].passes[0]
    assert (generation.first_s, generation.rest_s) == (1.0, 1.0)  # three readings: start, first token, end


def test_limit_is_the_larger_of_compute_and_optimal_reads() -> None:
    events = [Event((0,), True), Event((1,), True), Event((2,), True), Event((0,), True)]
    assert limit_s(events, capacity=2, compute_s=1.0, block_s=0.5) == 1.5  # 0, 1, 2 miss; the optimum keeps 0
    assert limit_s(events, capacity=2, compute_s=9.0, block_s=0.5) == 9.0


def test_link_probe_reads_whole_blocks(models) -> None:
    handle = models[1].foregate
    probe = LinkProbe(handle.store, handle.reader)
    try:
        probe()
        probe()
        assert len(probe.seconds_per_block) == 2
        assert probe.median_s > 0
        assert probe._transfers.stats().demand_bytes == 2 * PROBE_BLOCKS * handle.store.block_bytes
    finally:
        probe.close()


def test_report_is_one_escaped_page_with_every_figure(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    write_report(
        path,
        title="a < b",
        summary=["one & two"],
        table=[{"arm": "lru", "x": "1"}, {"arm": "<script>", "x": "2"}],
        figures=[("heat", heat_map(np.eye(3, 4))), ("rates", hit_rates({"lru": [0.1, 0.5], "foregate": [0.2, 0.6]}))],
        settings={"seed": 0},
    )
    text = path.read_text(encoding="utf-8")
    assert "<script>" not in text
    assert "a &lt; b" in text
    assert "one &amp; two" in text
    assert text.count("<svg") == 2
    assert not re.search(r'(?:src|href)="https?:', text.replace("http://www.w3.org", ""))
    assert [item.name for item in tmp_path.iterdir()] == ["report.html"]
    HTMLParser().feed(text)
