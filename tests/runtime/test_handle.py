"""`model.foregate`: predictors beside a running model, failures, numbers, and every way to end."""

from __future__ import annotations

import gc
import logging
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from foregate.collect.errors import ClosedError, StoreError, TransferError
from foregate.collect.topology import MoeTopology
from foregate.predictors.base import Prediction, PredictorSpec, Step
from foregate.runtime import load
from foregate.runtime.handle import Foregate
from foregate.runtime.layers.fused import FusedLayer
from foregate.runtime.prefetch import Windows
from foregate.runtime.store import ExpertStore

Pack = Callable[..., Any]
PATIENCE = 20.0


def our_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("foregate")]


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    yield
    assert not our_threads()


class Guessing:
    """A token predictor that names random experts, or fails, or notes what it is given."""

    def __init__(self, topology: MoeTopology, fail_at: int | None = None) -> None:
        self.spec = PredictorSpec(
            family="guessing", horizon="token", topology=topology, stack=topology.stacks[-1], vocab_size=320
        )
        self.random = np.random.default_rng(0)
        self.fail_at, self.calls = fail_at, 0
        self.pairs: list[tuple[int, list[list[int]]]] = []

    def start(self, batch: int) -> None:
        self.pairs = []

    def step(self, step: Step, state: object) -> tuple[Prediction, object]:
        self.calls += 1
        if self.calls == self.fail_at:
            raise ValueError("lost my way")
        used = [sorted(np.nonzero(row)[0].tolist()) for row in step.previous[0]]
        self.pairs.append((int(step.token_ids[0]), used))
        drawn = self.random.random((len(step.token_ids), *self.spec.shape)).astype(np.float32)
        return Prediction(drawn), state


class Idle(Windows):
    """A link that has all the time there is."""

    def __init__(self, num_layers: int) -> None:
        super().__init__(num_layers)
        self.idle_s, self.read_s = [10.0] * num_layers, 1e-6


@pytest.fixture
def with_predictor(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Load a store with a predictor that is always in time."""

    def build(store: Path, predictor: type = Guessing, *, in_time: bool = True, **settings: Any) -> Any:
        options = {"fail_at": settings.pop("fail_at")} if "fail_at" in settings else {}
        monkeypatch.setattr(
            Foregate, "_open_predictor", lambda self, config, opened: predictor(opened.topology, **options)
        )
        model = load(store, predictor="a bundle", **settings)
        handle = model.foregate
        if in_time:
            latest = handle.predictor.latest
            handle.predictor.latest = lambda: (handle.predictor.drain(), latest())[1]
        if handle.engine.prefetcher is not None:
            handle.engine.prefetcher.windows = Idle(handle.store.topology.num_layers)
        return model

    return build


def tokens(model: Any, prompts: dict[str, torch.Tensor], new: int = 12) -> list[int]:
    torch.manual_seed(3)
    out = model.generate(**prompts, max_new_tokens=new, min_new_tokens=new, do_sample=True, pad_token_id=0)
    return out[0].tolist()


@pytest.mark.parametrize("mode", ["observe", "enforce", "auto"])
@pytest.mark.parametrize("name", ["qwen3_moe", "switch_transformers"])
def test_wrong_forecasts_change_no_bit(packed: Pack, with_predictor: Callable[..., Any], name: str, mode: str) -> None:
    pair = packed(name)
    model = with_predictor(pair.store, slots=0.5, mode=mode, probation=0.4)
    with model.foregate as handle:
        for seed in range(3):
            prompts = pair.prompts(1, 8, seed=seed)
            assert tokens(model, prompts) == tokens(pair.resident, prompts)
            handle.engine.check()
        assert handle.damaged_slots() == []
        stats = handle.stats()
        assert stats.forecasts > 0
        assert stats.late_forecasts == 0
        assert stats.forecast_recall is not None
        assert 0 < stats.forecast_recall < 1
        assert stats.predictor_ms is not None
        assert (stats.prefetches > 0) == (mode != "observe")
        assert stats.mode == {"observe": "observe", "enforce": "enforce", "auto": "enforce"}[mode]
        assert stats.reason.startswith("auto: acting" if mode == "auto" else "set by the user")


def test_the_predictor_gets_the_routing_of_one_pass_over_the_text(
    packed: Pack, with_predictor: Callable[..., Any]
) -> None:
    pair = packed("qwen3_moe")
    prompts = pair.prompts(1, 8)
    model = with_predictor(pair.store, slots=0.5, mode="observe")
    with model.foregate as handle:
        text = tokens(model, prompts)
        handle.predictor.drain()
        given = handle.predictor._predictor.pairs
    routed: list[torch.Tensor] = []
    hooks = [
        layer.mlp.experts.register_forward_pre_hook(lambda _, args: routed.append(args[1]))
        for layer in pair.resident.model.layers
    ]
    with torch.no_grad():
        pair.resident(torch.tensor([text]))
    for hook in hooks:
        hook.remove()
    expected = [(text[0], [[], []])]
    for token in range(1, len(text) - 1):
        expected.append((text[token], [sorted(layer[token - 1].tolist()) for layer in routed]))
    assert given == expected, "of the last token nothing is known: no forward has seen it"


def test_a_failing_predictor_is_switched_off_and_the_model_goes_on(
    packed: Pack, with_predictor: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    pair = packed("qwen3_moe")
    with caplog.at_level(logging.WARNING):
        model = with_predictor(pair.store, slots=0.5, mode="enforce", fail_at=5)
        with model.foregate as handle:
            prompts = pair.prompts(1, 8)
            assert tokens(model, prompts) == tokens(pair.resident, prompts)
            stats = handle.stats()
    assert (stats.mode, stats.reason) == ("off", "the predictor failed: lost my way")
    assert "predictor guessing failed and is switched off: lost my way" in caplog.text


def test_a_predictor_that_does_not_pay_is_asked_no_more(packed: Pack, with_predictor: Callable[..., Any]) -> None:
    pair = packed("qwen3_moe")
    model = with_predictor(pair.store, slots=0.5)
    with model.foregate as handle:
        handle.engine.guard.acting = False
        handle.engine.guard.reason = "auto: suspended for 2 windows"
        prompts = pair.prompts(1, 8)
        assert tokens(model, prompts) == tokens(pair.resident, prompts)
        stats = handle.stats()
        assert handle.predictor.calls == 0
    assert (stats.forecasts, stats.late_forecasts, stats.prefetches) == (0, 0, 0)
    assert (stats.mode, stats.reason) == ("off", "auto: suspended for 2 windows")


def test_no_probation_means_no_prefetch(packed: Pack, with_predictor: Callable[..., Any]) -> None:
    pair = packed("qwen3_moe")
    model = with_predictor(pair.store, slots=0.5, mode="enforce", probation=0.0)
    with model.foregate as handle:
        prompts = pair.prompts(1, 8)
        assert tokens(model, prompts) == tokens(pair.resident, prompts)
        assert handle.stats().prefetches == 0
        assert handle.stats().forecasts > 0


def test_mode_off_opens_no_predictor(packed: Pack) -> None:
    model = load(packed("qwen3_moe").store, slots=0.5, predictor="nowhere", mode="off")
    with model.foregate as handle:
        assert handle.predictor is None
        assert (handle.stats().mode, handle.stats().reason) == ("off", "switched off by the user")


def test_numbers_since_load_and_since_a_reset(packed: Pack, with_predictor: Callable[..., Any]) -> None:
    pair = packed("qwen3_moe")
    model = with_predictor(pair.store, slots=0.5, mode="enforce")
    with model.foregate as handle:
        tokens(model, pair.prompts(1, 8), new=5)
        first = handle.stats()
        assert (first.tokens, first.steps, first.events) == (12, 5, 10)
        assert first.hits + first.delayed_hits + first.misses >= 5 * 2 * 3
        assert first.bytes_read >= first.misses * first.block_bytes
        assert first.bytes_per_token == first.bytes_read / 12
        assert 0 < first.stall_s < first.experts_s
        assert first.wasted_bytes % first.block_bytes == 0
        assert first.reader in ("direct", "preadv", "seek")
        values = first.to_json()
        assert values["per_layer"][0]["misses"] == first.per_layer[0].misses
        assert {"hit_rate", "on_time_share", "bytes_per_token"} <= values.keys()

        handle.reset_stats()
        zero = handle.stats()
        assert (zero.tokens, zero.events, zero.bytes_read, zero.forecasts, zero.prefetches) == (0, 0, 0, 0, 0)
        assert (zero.predictor_ms, zero.on_time_share, zero.forecast_recall) == (None, None, None)
        assert (zero.hit_rate, zero.bytes_per_token) == (0.0, 0.0)
        tokens(model, pair.prompts(1, 8), new=5)
        again = handle.stats()
        assert again.tokens == 12
        assert again.predictor_ms is not None
        assert again.predictor_ms > 0
        assert sum(row.hits for row in again.per_layer) == again.hits


def test_damaged_slots_are_found(packed: Pack) -> None:
    pair = packed("qwen3_moe")
    model = load(pair.store, slots=0.5)
    with model.foregate as handle:
        tokens(model, pair.prompts(1, 8), new=2)
        assert handle.damaged_slots() == []
        with handle.engine.paused() as slot_of:
            expert, slot = next(iter(slot_of.items()))
        handle.arena.buffer(slot)[100] ^= 1
        assert handle.damaged_slots() == [expert]


def test_a_read_that_fails_names_expert_file_and_offset_and_the_next_works(packed: Pack, tmp_path: Path) -> None:
    pair = packed("qwen3_moe")
    store = tmp_path / "store"
    shutil.copytree(pair.store, store)
    model = load(store, slots=3, reader="preadv")
    prompts = pair.prompts(1, 8)
    with model.foregate as handle:
        path = store / "experts-00002.safetensors"
        content = path.read_bytes()
        with open(path, "r+b") as file:
            file.truncate(len(content) - 8192 * 6)
        with pytest.raises(
            TransferError, match=r"Expert \d of MoE layer 1 was not read: .*experts-00002.* at offset \d+"
        ):
            tokens(model, prompts)
        handle.engine.check()
        path.write_bytes(content)  # the same file, as a disk that answers again
        assert tokens(model, prompts) == tokens(pair.resident, prompts)
        assert handle.damaged_slots() == []


def test_close_joins_its_threads_and_takes_its_hooks_back(packed: Pack, with_predictor: Callable[..., Any]) -> None:
    pair = packed("qwen3_moe")
    model = with_predictor(pair.store, slots=0.5)
    assert sorted(thread.name for thread in our_threads()) == [
        "foregate-predictor",
        "foregate-transfer-0",
        "foregate-transfer-1",
    ]
    tokens(model, pair.prompts(1, 8), new=2)
    model.foregate.close()
    assert not our_threads()
    assert not any(item._forward_pre_hooks or item._forward_hooks for item in model.modules())
    model.foregate.close()
    with pytest.raises(ClosedError, match="load it again"), torch.no_grad():
        model(**pair.inputs(1, 3))
    assert model.foregate.stats().tokens > 0, "numbers outlive the threads"


def test_close_lets_the_event_of_another_thread_end(packed: Pack) -> None:
    pair = packed("qwen3_moe")
    model = load(pair.store, slots=3)
    inputs, running, ended = pair.inputs(1, 5), threading.Event(), []

    def run() -> None:
        with torch.no_grad():
            try:
                while True:
                    model(**inputs)
                    running.set()
            except BaseException as error:
                ended.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    assert running.wait(PATIENCE)
    model.foregate.close()
    thread.join(PATIENCE)
    assert [type(error) for error in ended] == [ClosedError]
    model.foregate.engine.check()


def test_a_model_that_is_dropped_ends_its_threads(packed: Pack, with_predictor: Callable[..., Any]) -> None:
    pair = packed("qwen3_moe")
    model = with_predictor(pair.store, slots=0.5, in_time=False)
    tokens(model, pair.prompts(1, 8), new=2)
    running = our_threads()
    assert len(running) == 3
    del model
    gc.collect()
    for thread in [*running, *our_threads()]:
        thread.join(PATIENCE)
    assert not any(thread.is_alive() for thread in running)


def test_a_load_that_fails_half_way_leaves_no_thread(packed: Pack, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise RuntimeError("no kernel today")

    monkeypatch.setattr(FusedLayer, "prepare", fail)
    with pytest.raises(RuntimeError, match="no kernel today"):
        load(packed("qwen3_moe").store, slots=0.5)
    assert not our_threads()


def test_a_store_of_another_model_is_refused(packed: Pack) -> None:
    from foregate.runtime.config import RuntimeConfig

    store = ExpertStore.open(packed("switch_transformers").store)
    with pytest.raises(StoreError, match=r"holds experts for encoder\..*; pack this model again"):
        Foregate(packed("qwen3_moe").resident, store, RuntimeConfig())
