"""How fast traces are replayed: accesses per second of every policy, compiled and in Python. Knows no command line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ...collect.errors import SettingError
from ...collect.shard import SequenceRouting
from ...collect.smoke import smoke
from ...collect.topology import MoeTopology
from ...collect.trace import Trace
from ..clock import Clock, SystemClock
from ..compiled import foreseen_replay, how_replayed, replays
from ..events import Events, events_of
from ..forecast import Forecast
from ..foreseen import foreseen_misses
from ..policies.registry import SIMULATED, PolicySetting
from ..simulation import early_load, num_slots, python_misses
from .machine import machine

TOPOLOGY = MoeTopology.uniform(24, 32, 4)  # of made-up routing, as gpt-oss-20b has
MADE_UP = 64  # forecasts, which are taken in turn


@dataclass(frozen=True, kw_only=True)
class SimulateBench:
    """Measure how many accesses per second every policy replays, compiled and in Python."""

    trace: str | None = None
    """Trace to replay; by default made-up routing of 24 layers, 32 experts, top-4, where few experts are common."""
    tokens: int = 10_000
    """Tokens of made-up routing, or the sequences of the trace that hold about as many."""
    python_tokens: int = 1000
    """Tokens that are replayed in Python."""
    capacity: float = 0.25
    """Experts that the cache holds: a share below 1, or their number."""

    def __post_init__(self) -> None:
        for name in ("tokens", "python_tokens"):
            if getattr(self, name) < 1:
                raise SettingError(f"{name} must be at least 1, got {getattr(self, name)}.")


def bench(settings: SimulateBench, clock: Clock | None = None) -> dict[str, Any]:
    """Replay every policy, once to compile it and once more to time it, and give accesses per second."""
    clock = clock or SystemClock()
    if settings.trace is None:
        rows, topology = made_up(smoke(settings.tokens, 200)), TOPOLOGY
    else:
        trace = Trace.open(settings.trace)
        rows, topology = list(_about(trace, smoke(settings.tokens, 200))), trace.topology
    capacity = num_slots(settings.capacity, topology)
    start = clock.now()
    events = events_of(rows, topology, "decode")
    events_s = clock.now() - start
    few = events_of(list(_about(rows, smoke(settings.python_tokens, 20))), topology, "decode")
    arms: dict[str, dict[str, Any]] = {}
    for name in SIMULATED:
        quick = replays().get(name)
        arms[name] = {"python_per_s": _rate(few, name, _setting(few, topology, capacity), None, clock)}
        if quick is not None:
            setting = _setting(events, topology, capacity)
            quick(few, _setting(few, topology, capacity))
            arms[name]["compiled_per_s"] = _rate(events, name, setting, quick, clock)
    arms["predicted"] = _foreseen(events, few, topology, capacity, clock)
    return {
        "arms": arms,
        "replay": how_replayed(),
        "accesses": events.accesses,
        "events_per_s": events.accesses / max(events_s, 1e-9),
        "capacity": capacity,
        "machine": machine(),
    }


def describe(result: dict[str, Any]) -> str:
    """Say the speeds in lines."""
    lines = [f"{result['accesses']} accesses, {result['capacity']} experts held; replay runs in {result['replay']}"]
    for name, arm in result["arms"].items():
        compiled = f"{arm['compiled_per_s'] / 1e6:8.1f}" if "compiled_per_s" in arm else "       -"
        lines.append(f"  {name:<10} {compiled} M/s compiled  {arm['python_per_s'] / 1e6:6.2f} M/s in Python")
    lines.append(f"  {'events':<10} {result['events_per_s'] / 1e6:8.1f} M/s to read rows as events")
    return "\n".join(lines)


def made_up(tokens: int, length: int = 200, seed: int = 0) -> list[SequenceRouting]:
    """Make routing in which an expert is as common as its place in a random order of its layer says, and lingers."""
    random = np.random.default_rng(seed)
    layer = TOPOLOGY.layers[0]
    liking = random.gumbel(size=(TOPOLOGY.num_layers, layer.num_experts))
    rows = []
    for first in range(0, tokens, length):
        count = min(length, tokens - first)
        mood = liking + random.gumbel(size=(1 + count // 50, *liking.shape)).repeat(50, axis=0)[:count]
        chosen = np.argsort(-(mood + random.gumbel(size=mood.shape)), axis=-1)[..., : layer.top_k]
        rows.append(SequenceRouting(sequence=str(first), experts=chosen.reshape(count, -1).astype(np.int16)))
    return rows


def _about(rows: Any, tokens: int) -> Any:
    """Give the first rows that hold at least so many tokens, or all."""
    for row in rows:
        yield row
        tokens -= row.num_tokens
        if tokens <= 0:
            return


def _setting(events: Events, topology: MoeTopology, capacity: int) -> PolicySetting:
    future = [event.needed for event in events]
    return PolicySetting(topology=topology, capacity=capacity, future=future, load=early_load(events, topology))


def made_up_forecasts(steps: int, topology: MoeTopology, seed: int = 0) -> list[Forecast]:
    """Make a forecast of every step by chance, so that more is missed than with a predictor's."""
    random = np.random.default_rng(seed)
    demand, reuse = random.random((2, MADE_UP, topology.num_experts), dtype=np.float32)
    return [Forecast(step, demand[step % MADE_UP], reuse[step % MADE_UP]) for step in range(steps)]


def _foreseen(events: Events, few: Events, topology: MoeTopology, capacity: int, clock: Clock) -> dict[str, float]:
    """Time the policy that is given forecasts; making them is not timed."""
    forecasts = made_up_forecasts(int(events.steps.max(initial=-1)) + 1, topology)
    ways = [("python_per_s", few, False)]
    if foreseen_replay() is not None:
        foreseen_misses(few, [capacity], topology, forecasts)
        ways.append(("compiled_per_s", events, True))
    found = {}
    for name, replayed, quick in ways:
        start = clock.now()
        foreseen_misses(replayed, [capacity], topology, forecasts, quick=quick)
        found[name] = replayed.accesses / max(clock.now() - start, 1e-9)
    return found


def _rate(events: Events, name: str, setting: PolicySetting, quick: Any, clock: Clock) -> float:
    start = clock.now()
    if quick is None:
        python_misses(events, name, setting)
    else:
        quick(events, setting)
    return events.accesses / max(clock.now() - start, 1e-9)
