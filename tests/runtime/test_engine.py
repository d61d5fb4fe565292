"""The engine over real bytes: every slot holds its expert when it is yielded, whatever lands, fails or stops when."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from foregate.collect.errors import ClosedError, TransferError
from foregate.collect.shard import SequenceRouting
from foregate.collect.topology import ExpertId, MoeLayer, MoeTopology
from foregate.runtime.cache import ExpertCache
from foregate.runtime.clock import ManualClock
from foregate.runtime.engine import ExpertEngine
from foregate.runtime.events import events_of
from foregate.runtime.forecast import Forecast
from foregate.runtime.foreseen import foreseen_misses
from foregate.runtime.placement import slots_for
from foregate.runtime.policies import EvictionPolicy, Lru, Predicted
from foregate.runtime.prefetch import Prefetcher, Windows
from foregate.runtime.readers import open_reader
from foregate.runtime.replay import Event, replay_lru
from foregate.runtime.serving import Serving
from foregate.runtime.slots import SlotArena
from foregate.runtime.store import Segment
from foregate.runtime.transfer import InlineTransfers, ThreadedTransfers
from foregate.runtime.transfer_queue import Transfer
from hypothesis import given, settings
from hypothesis import strategies as st

BLOCK = 4096
TOPOLOGY = MoeTopology(
    layers=tuple(MoeLayer(stack="causal", block=i, num_experts=n, top_k=1) for i, n in enumerate((4, 5, 3)))
)
EXPERTS = TOPOLOGY.num_experts


class Blocks:
    """A store of one marked block per expert."""

    block_bytes = BLOCK
    topology = TOPOLOGY

    def __init__(self, path: Path | None = None) -> None:
        self.files = [path] if path else []
        if path:
            path.write_bytes(b"".join(map(self.block, range(EXPERTS))))

    def segments(self, flat: int) -> tuple[Segment, ...]:
        return (Segment(0, flat * BLOCK, BLOCK, 0),)

    def block(self, flat: int) -> bytes:
        return flat.to_bytes(2, "little") * (BLOCK // 2)

    def __getitem__(self, expert: ExpertId) -> bytes:
        return self.block(TOPOLOGY.flat(*expert))


class _Orderly(Random):
    def choice(self, seq: Sequence[Any]) -> Any:
        return seq[0]


ORDERLY = _Orderly()  # the oldest first, and nothing by itself


class Scripted(InlineTransfers):
    """Inline transfers that end in random order, and fail where the script says so."""

    def __init__(self, random: Random, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.random = random
        self.fail_next = False

    def wait_any(self, transfers: Sequence[Transfer]) -> Transfer:
        chosen = self.random.choice(list(transfers))
        if not any(transfer.done() for transfer in transfers):
            if self.fail_next:
                self.fail_next = False
                self.fail(chosen, TransferError(f"expert {chosen.expert} is unreadable"))
            else:
                self.finish(chosen)
        return super().wait_any(transfers)

    def stir(self) -> None:
        """Let some prefetches land and some fail, where the script is random."""
        for transfer in self.pending:
            if not transfer.demand and self.random is not ORDERLY:
                fate = self.random.random()
                if fate < 0.4:
                    self.finish(transfer)
                elif fate < 0.5:
                    self.fail(transfer, TransferError("lost"))


class Generous(Windows):
    """Windows in which every read fits."""

    def __init__(self) -> None:
        super().__init__(TOPOLOGY.num_layers)
        self.read_s, self.idle_s = 1e-6, [1.0] * TOPOLOGY.num_layers

    def note_idle(self, layer: int, seconds: float) -> None:
        pass

    def note_read(self, seconds: float) -> None:
        pass


class Rig:
    """An engine with its arena, its transfers and a script."""

    def __init__(
        self, capacity: int, *, probation: int = 0, policy: EvictionPolicy | None = None, random: Random | None = None
    ) -> None:
        self.store, self.clock = Blocks(), ManualClock()
        self.arena = SlotArena(slots_for(capacity, EXPERTS), BLOCK)
        self.random = random or ORDERLY
        self.transfers = Scripted(self.random, self.store, self.arena.buffer, self.clock)  # type: ignore[arg-type]
        cache = ExpertCache(capacity, policy or Lru(), probation=probation)
        prefetcher = Prefetcher(TOPOLOGY, Generous(), limit=probation) if probation else None
        self.engine = ExpertEngine(TOPOLOGY, cache, self.transfers, self.clock, prefetcher=prefetcher)
        self.counters = self.engine.counters

    def holds(self, slot: int, expert: int) -> bool:
        return bytes(self.arena.buffer(slot)[:BLOCK]) == self.store.block(expert)

    def event(self, *needed: int, one_token: bool = True, forecast: Forecast | None = None) -> list[int]:
        """Serve an event and give the experts in the order in which they came."""
        came = []
        layer = TOPOLOGY.ids[needed[0]].layer
        with self.engine.acquire(layer, needed, one_token=one_token, forecast=forecast) as experts:
            for expert, slot in experts:
                assert self.holds(slot, expert)
                self.transfers.stir()
                assert self.holds(slot, expert), "a slot changed while its expert was computed"
                came.append(expert)
        self.engine.check()
        assert sorted(came) == sorted(needed)
        return came


def forecast(step: int, *experts: int) -> Forecast:
    demand = np.zeros(EXPERTS, np.float32)
    demand[list(experts)] = 1.0
    return Forecast(step, demand)


def events(one_token: st.SearchStrategy[bool]) -> st.SearchStrategy[list[Event]]:
    def of_layer(layer: int) -> st.SearchStrategy[Event]:
        low, high = TOPOLOGY.offsets[layer], TOPOLOGY.offsets[layer + 1]
        needed = st.sets(st.integers(low, high - 1), min_size=1).map(lambda ids: tuple(sorted(ids)))
        return st.builds(Event, needed, one_token)

    return st.lists(st.integers(0, TOPOLOGY.num_layers - 1).flatmap(of_layer), max_size=25)


@given(drawn=events(st.booleans()), capacity=st.integers(1, EXPERTS), random=st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_without_prefetch_the_counts_are_those_of_the_replay(drawn: list[Event], capacity: int, random: Random) -> None:
    rig = Rig(capacity, random=random)
    rig.engine.events_log = []
    for event in drawn:
        rig.event(*event.needed, one_token=event.one_token)
    assert rig.engine.events_log == drawn
    expected = replay_lru(drawn, capacity)
    assert rig.counters.hits + rig.counters.misses == expected.accesses
    assert rig.counters.misses == expected.misses
    assert rig.counters.delayed_hits == 0
    assert rig.transfers.stats().demands == expected.misses, "each miss is read once"
    assert [sum(row) for row in zip(*rig.counters.layers, strict=True)] == [rig.counters.hits, 0, rig.counters.misses]


@given(seed=st.integers(0, 1 << 16), capacity=st.integers(1, EXPERTS), steps=st.integers(1, 12), late=st.floats(0, 1))
@settings(max_examples=40, deadline=None)
def test_with_forecasts_the_misses_are_those_of_their_replay(seed: int, capacity: int, steps: int, late: float) -> None:
    """One forward of each step, with or without a forecast in time; nothing is prefetched."""
    random = np.random.default_rng(seed)
    rig, forecasts = Rig(capacity, policy=Predicted(TOPOLOGY)), []
    columns = np.stack([random.integers(0, layer.num_experts, steps) for layer in TOPOLOGY.layers], axis=1)
    row = SequenceRouting(sequence="0", experts=columns.astype(np.int16))
    for step in range(steps):
        demand, reuse = random.random((2, EXPERTS), dtype=np.float32)
        said = Forecast(step, demand, reuse) if random.random() >= late else None
        forecasts += [said] if said else []
        for layer, expert in enumerate(columns[step].tolist()):
            rig.event(TOPOLOGY.flat(layer, expert), forecast=said)
    wanted = foreseen_misses(events_of([row], TOPOLOGY, "decode"), [capacity], TOPOLOGY, forecasts)
    assert rig.counters.misses == wanted[capacity].sum()


class Stop(Exception):
    """What a consumer raises in mid-event."""


@given(
    drawn=events(st.booleans()),
    capacity=st.integers(1, EXPERTS),
    guesses=st.floats(0, 1),
    predicted=st.booleans(),
    random=st.randoms(use_true_random=False),
)
@settings(max_examples=120, deadline=None)
def test_every_slot_holds_its_expert_whatever_happens(
    drawn: list[Event], capacity: int, guesses: float, predicted: bool, random: Random
) -> None:
    probation = int(guesses * (capacity - 1))
    rig = Rig(capacity, probation=probation, policy=Predicted(TOPOLOGY) if predicted else None, random=random)
    for step, event in enumerate(drawn):
        demand, reuse = (np.array([random.random() for _ in range(EXPERTS)], np.float32) for _ in range(2))
        said = Forecast(step, demand, reuse if step % 2 else None)
        layer = TOPOLOGY.ids[event.needed[0]].layer
        ending = random.choice(["full", "full", "full", "leave", "raise", "fail"])
        stop_after = random.randrange(len(event.needed) + 1)
        rig.transfers.fail_next = ending == "fail"
        came: list[int] = []
        failed: BaseException | None = None
        try:
            with rig.engine.acquire(layer, event.needed, one_token=event.one_token, forecast=said) as experts:
                for expert, slot in experts:
                    assert rig.holds(slot, expert)
                    rig.transfers.stir()
                    assert rig.holds(slot, expert)
                    came.append(expert)
                    if ending in ("leave", "raise") and len(came) > stop_after:
                        if ending == "raise":
                            raise Stop
                        break
        except (Stop, TransferError) as error:
            failed = error
        rig.engine.check()
        assert len(came) == len(set(came))
        assert set(came) <= set(event.needed)
        assert (failed is not None) <= (ending in ("raise", "fail"))
        if failed is None and ending != "leave":
            assert set(came) == set(event.needed)
        assert not any(transfer.demand for transfer in rig.transfers.pending), "a load outlived its event"
        rig.transfers.fail_next = False
        rig.transfers.stir()
        rig.engine.check()
        with rig.engine.paused() as slot_of:
            assert all(rig.holds(slot, expert) for expert, slot in slot_of.items())
            assert set(slot_of) == rig.engine.cache.resident
    counters = rig.counters
    assert counters.on_time + counters.wasted <= counters.prefetches
    assert counters.prefetches + counters.misses >= rig.transfers.stats().prefetches


@given(drawn=events(st.just(True)), capacity=st.integers(5, EXPERTS), random=st.randoms(use_true_random=False))
@settings(max_examples=30, deadline=None)
def test_a_token_never_reads_an_expert_twice(drawn: list[Event], capacity: int, random: Random) -> None:
    rig = Rig(capacity, probation=capacity - 5, random=random)
    for step, event in enumerate(drawn):
        before = rig.transfers.stats().demands
        said = Forecast(step, np.array([random.random() for _ in range(EXPERTS)], np.float32))
        rig.event(*event.needed, forecast=said)
        assert rig.transfers.stats().demands - before <= len(event.needed)
        assert set(event.needed) <= rig.engine.cache.resident


def test_resident_experts_come_first_and_then_those_that_arrive() -> None:
    rig = Rig(6)
    rig.event(1, 3)
    assert rig.event(0, 1, 2, 3)[:2] == [1, 3]


def test_a_slot_is_given_out_no_longer_than_the_block_lasts() -> None:
    rig = Rig(6)
    with rig.engine.acquire(0, [0, 1, 2], one_token=True) as experts:
        next(experts)
    assert list(experts) == []
    rig.engine.check()
    assert rig.engine.cache.resident <= {0, 1, 2}


def test_the_link_is_idle_once_and_only_when_all_is_read() -> None:
    rig = Rig(2)
    rig.event(2, 3)
    placement, needed = rig.engine.placement, [0, 1, 2, 3]
    plan = placement.begin(needed, one_token=False)
    assert plan.leaving == [0, 1], "both pass through, one slot is to spare"
    left: list[int] = []
    serving = Serving(
        placement,
        needed,
        plan,
        rig.clock,
        rig.engine.windows,
        on_idle=lambda: left.append(len(serving.queue) + len(rig.transfers.pending)),
    )
    serving.start()
    assert [expert for expert, _ in serving.experts] == [2, 3, 0, 1]
    serving.end()
    assert left == [0]
    rig.engine.check()


def test_a_failed_demand_raises_and_the_engine_works_on() -> None:
    rig = Rig(6)
    rig.event(0)
    rig.transfers.fail_next = True
    with (
        pytest.raises(TransferError, match="expert 1 is unreadable"),
        rig.engine.acquire(0, [0, 1], one_token=True) as experts,
    ):
        assert [expert for expert, _ in experts] == [0]
    rig.engine.check()
    assert rig.engine.cache.resident == {0}
    assert rig.event(0, 1) == [0, 1]


def test_a_prefetch_that_landed_is_a_hit_on_time() -> None:
    rig = Rig(6, probation=2)
    rig.event(0, forecast=forecast(1, 4, 9))
    assert [transfer.expert for transfer in rig.transfers.pending] == [4, 9]
    for transfer in rig.transfers.pending:
        rig.transfers.finish(transfer)
    assert rig.event(4, forecast=forecast(1, 4, 9)) == [4]
    counters = rig.counters
    assert (counters.prefetches, counters.on_time, counters.hits, counters.misses) == (2, 1, 1, 1)
    rig.event(10)  # layer 2 does without 9
    assert counters.wasted == 0
    for expert in (0, 1, 2, 3, 5):
        rig.event(expert)
    assert counters.wasted == 1


def test_a_prefetch_under_way_is_a_delayed_hit_and_goes_first() -> None:
    rig = Rig(6, probation=2)
    rig.event(0, forecast=forecast(1, 4, 9))
    transfer = rig.transfers.pending[0]
    assert rig.event(4) == [4]
    assert transfer.demand
    assert (rig.counters.delayed_hits, rig.counters.on_time, rig.counters.misses) == (1, 0, 1)
    assert rig.transfers.stats().demands == 2


def test_what_the_router_did_not_choose_is_dropped() -> None:
    rig = Rig(6, probation=2)
    rig.event(0, forecast=forecast(1, 4, 9))
    rig.event(5)
    assert [transfer.expert for transfer in rig.transfers.pending] == [9]
    assert rig.counters.dropped_prefetches == 1
    assert rig.counters.wasted == 0, "nothing of it had been read"
    assert rig.transfers.stats().cancelled == 1


def test_a_failed_prefetch_is_counted_and_its_slot_comes_back() -> None:
    rig = Rig(6, probation=2)
    rig.event(0, forecast=forecast(1, 4))
    rig.transfers.fail(rig.transfers.pending[0], TransferError("lost"))
    assert rig.event(4) == [4]
    assert (rig.counters.failed_prefetches, rig.counters.misses, rig.counters.delayed_hits) == (1, 2, 0)


def test_a_prefetch_that_fails_when_it_is_needed_is_read_again() -> None:
    rig = Rig(6, probation=2)
    rig.event(0, forecast=forecast(1, 4))
    placement = rig.engine.placement
    assert placement.begin([4], one_token=True).delayed == [4]
    rig.transfers.fail(rig.transfers.pending[0], TransferError("lost"))  # between the event's start and the promotion
    again = placement.promote(4)
    assert again.demand
    assert rig.transfers.wait_any([again]).landed
    assert rig.counters.failed_prefetches == 1
    rig.engine.check()


def test_a_prefetch_never_pushes_out_what_the_event_computes() -> None:
    rig = Rig(2, probation=1)
    rig.event(0)
    with rig.engine.acquire(0, [0, 1], one_token=True, forecast=forecast(1, 4)) as experts:
        for expert, slot in experts:
            assert rig.holds(slot, expert)
            for transfer in rig.transfers.pending:
                if not transfer.demand:
                    rig.transfers.finish(transfer)
            assert rig.holds(slot, expert)
    assert rig.engine.cache.resident == {0, 1}
    assert rig.counters.prefetches == 0


def test_no_forecast_is_acted_on_where_the_guard_rests() -> None:
    rig = Rig(6, probation=2)
    engine = ExpertEngine(
        TOPOLOGY,
        ExpertCache(6, Lru(), probation=2),
        rig.transfers,
        rig.clock,
        prefetcher=Prefetcher(TOPOLOGY, Generous()),
        shadow=ExpertCache(6, Lru()),
    )
    assert engine.guard is not None
    engine.guard.acting = False
    assert not engine.acting
    with engine.acquire(0, [0], one_token=True, forecast=forecast(1, 4)) as experts:
        list(experts)
    assert engine.counters.prefetches == 0


def test_times_are_the_clock_s() -> None:
    rig = Rig(6)
    finish = rig.transfers.finish

    def slow(transfer: Transfer) -> None:
        rig.clock.advance(2.0)
        finish(transfer)

    rig.transfers.finish = slow  # type: ignore[method-assign]
    with rig.engine.acquire(0, [0, 1], one_token=True) as experts:
        for _ in experts:
            rig.clock.advance(0.5)
    assert rig.counters.stall_s == 4.0
    assert rig.counters.experts_s == 5.0
    rig.clock.advance(3.0)
    with rig.engine.acquire(1, [4], one_token=True) as experts:
        list(experts)
    # the link was idle after layer 0 from its last arrival on: half a second of compute and three more
    assert rig.engine.windows.idle_s[0] == pytest.approx(0.1 * 3.5)


def test_an_event_that_failed_says_nothing_of_idle_times() -> None:
    rig = Rig(6)
    rig.transfers.fail_next = True
    with pytest.raises(TransferError), rig.engine.acquire(0, [0], one_token=True) as experts:
        list(experts)
    rig.clock.advance(9.0)
    rig.event(4)
    assert rig.engine.windows.idle_s == [0.0, 0.0, 0.0]


def test_counting_anew_keeps_the_experts() -> None:
    rig = Rig(6, probation=2)
    rig.event(0, 1, forecast=forecast(1, 4))
    rig.engine.reset_counters()
    assert rig.counters is rig.engine.counters
    assert (rig.counters.misses, rig.counters.prefetches, rig.counters.events) == (0, 0, 0)
    assert rig.event(0, 1) == [0, 1]
    assert (rig.counters.hits, rig.counters.misses) == (2, 0)


def test_close_ends_serving_and_is_idempotent() -> None:
    rig = Rig(6, probation=2)
    rig.event(0, forecast=forecast(1, 4))
    rig.engine.close()
    rig.transfers.close()
    rig.engine.close()
    with pytest.raises(ClosedError, match="load it again"), rig.engine.acquire(0, [0], one_token=True):
        raise AssertionError("served after close")
    with rig.engine.paused() as slot_of:
        assert list(slot_of) == [0], "a prefetch that was dropped holds nothing"
    rig.engine.check()


def test_two_threads_take_turns(tmp_path: Path) -> None:
    store = Blocks(tmp_path / "experts")
    arena = SlotArena(slots_for(4, EXPERTS), BLOCK)
    reader = open_reader(store.files, "preadv")
    wrong: list[tuple[int, int]] = []
    inside = threading.Lock()

    def run(engine: ExpertEngine, seed: int) -> None:
        random = Random(seed)
        for _ in range(60):
            layer = random.randrange(TOPOLOGY.num_layers)
            low, high = TOPOLOGY.offsets[layer], TOPOLOGY.offsets[layer + 1]
            needed = sorted(random.sample(range(low, high), random.randint(1, 3)))
            with engine.acquire(layer, needed, one_token=random.random() < 0.5) as experts:
                alone = inside.acquire(blocking=False)
                for expert, slot in experts:
                    if not alone or bytes(arena.buffer(slot)) != store.block(expert):
                        wrong.append((expert, slot))
                inside.release()

    with ThreadedTransfers(store, arena.buffer, reader) as transfers:  # type: ignore[arg-type]
        engine = ExpertEngine(TOPOLOGY, ExpertCache(4, Lru()), transfers, ManualClock())
        threads = [threading.Thread(target=run, args=(engine, seed)) for seed in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        engine.check()
        assert engine.counters.events == 120
    reader.close()
    assert not wrong
