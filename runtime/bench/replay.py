"""The engine driven by recorded routing: real reads, real matrix products, no model. Every arm in one run, in turns.

Each round serves other tokens than the one before, the same in all arms, and the cache goes on as the round before left
it; a warm-up comes first and is not counted. The limit of a round is max(its time where everything is resident, the
misses of Belady's optimum in it x the time of a read, probed in the same round).
"""

from __future__ import annotations

import contextlib
import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...collect.errors import DataError, SettingError
from ...collect.smoke import smoke
from ...collect.topology import MoeTopology
from ...collect.trace import SequenceRouting, Trace
from ...predictors.base import PredictorSpec
from ...predictors.baselines import TokenTable
from ...predictors.bundle import Bundle, load_predictor
from ...predictors.rows import dense, fingerprint, ids_of, join_parts
from ..cache import ExpertCache
from ..clock import SystemClock
from ..engine import ExpertEngine
from ..placement import slots_for
from ..policies import Lru, Predicted
from ..policies.base import EvictionPolicy
from ..policies.belady import Belady
from ..policies.registry import PolicySetting, make_policy
from ..predictor_thread import PredictorThread
from ..prefetch import Prefetcher, Windows
from ..readers import Reader, open_reader
from ..replay import Event, replay
from ..slots import SlotArena
from ..steps import StepTracker
from ..transfer import ThreadedTransfers
from .limit import LinkProbe
from .machine import machine
from .replay_arm import Foreknown, ReplayArm, Steps, Token, counts_of, needed_of
from .replay_blocks import ReplayBlocks

TRACE = "gpt-oss-20b_mixed.npz"
FREE = ("lru", "lfu", "lfru", "s3fifo", "layer_lru", "activation")  # without a predictor
CHOICE_TOKENS = 2000  # of training sequences, by which the best of those is chosen
PROBATION = 0.1  # of the slots: RuntimeConfig's


@dataclass(frozen=True, kw_only=True)
class ReplayBench:
    """Drive the engine by a trace's routing and compare it with LRU, with free signals, and with the limit."""

    trace: str | None = None
    """Trace to replay; the one of gpt-oss-20b under FOREGATE_SHARED (../shared by default) where not given."""
    predictor: str | None = None
    """Predictor bundle; where not given, one is trained on the first 80 % of the sequences, for at most 6 minutes."""
    tokens: int = 160
    """Tokens of a round."""
    rounds: int = 5
    """Rounds, each over further tokens."""
    warmup: int = 64
    """Tokens before the first round, which fill the caches."""
    slots: float = 0.25
    """Share of the experts that have a slot."""
    block_mib: float = 4.0
    """Size of an expert."""
    threads: int = 2
    """Threads that read, in each arm."""
    folder: str = "runs/replay"
    """Folder for the experts' file, which is removed at the end."""

    def __post_init__(self) -> None:
        for name in ("tokens", "rounds", "threads"):
            if getattr(self, name) < 1:
                raise SettingError(f"{name} must be at least 1, got {getattr(self, name)}.")
        if self.warmup < 0:
            raise SettingError(f"warmup must be at least 0, got {self.warmup}.")
        if not 0 < self.slots < 1:
            raise SettingError(f"slots must lie in (0, 1), got {self.slots}.")
        if self.block_mib <= 0:
            raise SettingError(f"block_mib must be positive, got {self.block_mib}.")

    @property
    def trace_path(self) -> Path:
        """The trace."""
        if self.trace is not None:
            return Path(self.trace)
        return Path(os.environ.get("FOREGATE_SHARED", "../shared")) / "traces" / TRACE


def bench(settings: ReplayBench) -> dict[str, Any]:
    """Replay every arm and give medians, spread, bytes, stalls and measured / limit.

    Returns:
        {"identical", "arms": {NAME: {"tokens_per_s", "tokens_per_s_range", "measured_over_limit",
        "measured_over_limit_range", "mib_per_token", counts}}, "over_lru", "engine_ms_per_token", "read_ms",
        "gb_per_s", "tokens", "slots", "free_policy", "machine"}

    Raises:
        TraceError, BundleError: if trace or bundle cannot be read, or do not fit each other.
        DataError: if the predictor has seen so much of the trace that too few tokens are left.
        SettingError: if there is no predictor, or no room on the disk.
    """
    if settings.predictor is None:
        raise SettingError("predictor must be a bundle; foregate bench replay trains one where none is given.")
    if not settings.trace_path.exists():
        raise DataError(
            f"There is no trace {settings.trace_path}; name one by --trace, or set FOREGATE_SHARED to the folder that "
            "has traces/."
        )
    trace, bundle = Trace.open(settings.trace_path), Bundle.open(settings.predictor)
    bundle.require(trace.topology, trace.header.model_fingerprint)
    rounds, warmup = smoke(settings.rounds, 2), smoke(settings.warmup, 4)
    per_round = smoke(settings.tokens, 8)
    seen, tokens = _dealt(trace, bundle, warmup + rounds * per_round)
    folder = Path(settings.folder)
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        path = folder / f"experts-{os.getpid()}.bin"
        stack.callback(path.unlink, missing_ok=True)
        blocks = ReplayBlocks(path, trace.topology, int(settings.block_mib * 2**20))
        blocks.write()
        race = _Race(settings, blocks, tokens, stack)
        race.add_arms(bundle, seen)
        return race.run(warmup, per_round, rounds)


class _Race:
    """All arms over one file of experts and one list of tokens."""

    def __init__(
        self, settings: ReplayBench, blocks: ReplayBlocks, tokens: list[Token], stack: contextlib.ExitStack
    ) -> None:
        self.settings, self.blocks, self.tokens, self.stack = settings, blocks, tokens, stack
        self.topology: MoeTopology = blocks.topology
        self.clock = SystemClock()
        self.capacity = int(settings.slots * self.topology.num_experts)
        self.events = [Event(needed, True) for token in tokens for needed in needed_of(token, self.topology) if needed]
        self.reader = open_reader(blocks.files, "auto")
        stack.callback(self.reader.close)
        self.probe = LinkProbe(blocks, self.reader, num_threads=settings.threads)
        stack.callback(self.probe.close)
        self.arms: dict[str, ReplayArm] = {}
        self.transfers: dict[str, ThreadedTransfers] = {}
        self.free_policy = ""

    def add_arms(self, bundle: Bundle, seen: list[Token]) -> None:
        """Make every arm."""
        everything = SlotArena(self.topology.num_experts, self.blocks.block_bytes)
        _fill(everything, self.blocks, self.reader)
        self.arms["resident"] = ReplayArm(self.topology, everything, self.blocks.layout, self.clock)
        self._add("held", Lru(), capacity=self.topology.num_experts)
        self._add("lru", Lru())
        spec = bundle.spec
        self.free_policy = _best_free(seen, self.topology, self.capacity)
        setting = PolicySetting(topology=self.topology, capacity=self.capacity)
        table = TokenTable(_token_spec(spec)).fit(_rows_of(seen))
        self._add("no_predictor", make_policy(self.free_policy, setting), predictor=table)
        self._add("foregate", Predicted(self.topology), predictor=load_predictor(bundle), guarded=True)
        foreknown = Foreknown(self.topology, self.tokens)
        self._add("oracle", Belady([event.needed for event in self.events]), steps=foreknown)

    def _add(
        self,
        name: str,
        policy: EvictionPolicy,
        *,
        capacity: int | None = None,
        predictor: Any = None,
        steps: Steps | None = None,
        guarded: bool = False,
    ) -> None:
        topology, blocks, stack = self.topology, self.blocks, self.stack
        held = capacity or self.capacity
        arena = SlotArena(slots_for(held, topology.num_experts), blocks.block_bytes)
        transfers = ThreadedTransfers(blocks, arena.buffer, self.reader, num_threads=self.settings.threads)
        stack.callback(transfers.close)
        thread = None if predictor is None else PredictorThread(predictor, topology, self.clock)
        if thread is not None:
            stack.callback(thread.close)
        acting = thread is not None or steps is not None
        probation = max(1, int(PROBATION * held)) if acting else 0
        windows = Windows(topology.num_layers)
        engine = ExpertEngine(
            topology,
            ExpertCache(held, policy, probation=probation),
            transfers,
            self.clock,
            prefetcher=Prefetcher(topology, windows, limit=probation) if acting else None,
            shadow=ExpertCache(held, Lru()) if guarded else None,
            predictor_s=None if thread is None else (lambda: thread.busy_s),
        )
        stack.callback(engine.close)
        if steps is None and thread is not None:
            steps = StepTracker(topology, engine.counters, thread, wanted=lambda: engine.acting)
        self.transfers[name] = transfers
        self.arms[name] = ReplayArm(topology, arena, blocks.layout, self.clock, engine=engine, steps=steps)

    def run(self, warmup: int, per_round: int, rounds: int) -> dict[str, Any]:
        """Serve the warm-up, then round by round the same tokens in every arm, each round beginning with another."""
        read_before: dict[str, int] = {}
        self.arms["held"].load_everything()
        for name, arm in self.arms.items():
            arm.run(self.tokens[:warmup])
            if arm.engine is not None:
                arm.engine.reset_counters()
                read_before[name] = _bytes(self.transfers[name])
        names = list(self.arms)
        for index in range(rounds):
            self.probe()
            start = warmup + index * per_round
            for name in names[index % len(names) :] + names[: index % len(names)]:
                arm = self.arms[name]
                arm.seconds.append(arm.run(self.tokens[start : start + per_round]))
        return self._report(warmup, per_round, rounds, read_before)

    def _report(self, warmup: int, per_round: int, rounds: int, read_before: dict[str, int]) -> dict[str, Any]:
        block_s = self.probe.seconds_per_block
        optimum = _optimum(self.tokens, self.topology, self.capacity, warmup, per_round)
        resident = self.arms["resident"].seconds
        limits = [max(resident[i], optimum[i] * block_s[i]) for i in range(rounds)]
        arms = {}
        for name, arm in self.arms.items():
            rates = [per_round / seconds for seconds in arm.seconds]
            shares = [seconds / limit for seconds, limit in zip(arm.seconds, limits, strict=True)]
            arms[name] = {
                "tokens_per_s": statistics.median(rates),
                "tokens_per_s_range": [min(rates), max(rates)],
                "measured_over_limit": statistics.median(shares),
                "measured_over_limit_range": [min(shares), max(shares)],
            }
            if arm.engine is not None:
                read = _bytes(self.transfers[name]) - read_before[name]
                guard = arm.engine.guard
                arms[name] |= {
                    "mib_per_token": read / 2**20 / (per_round * rounds),
                    **counts_of(arm.engine),
                    "reason": None if guard is None else guard.reason,
                }
        digests = {arm.digest.hexdigest() for arm in self.arms.values()}
        ratios = [a / b for a, b in zip(self.arms["lru"].seconds, self.arms["foregate"].seconds, strict=True)]
        engine_s = [a - b for a, b in zip(self.arms["held"].seconds, resident, strict=True)]
        return {
            "identical": len(digests) == 1,
            "arms": arms,
            "over_lru": statistics.median(ratios),
            "over_lru_range": [min(ratios), max(ratios)],
            "engine_ms_per_token": 1e3 * statistics.median(engine_s) / per_round,
            "read_ms": 1e3 * statistics.median(block_s),
            "gb_per_s": self.blocks.block_bytes / statistics.median(block_s) / 1e9,
            "reader": self.reader.kind,
            "tokens": per_round,
            "rounds": rounds,
            "warmup": warmup,
            "slots": self.capacity,
            "experts": self.topology.num_experts,
            "free_policy": self.free_policy,
            "machine": machine(),
        }


def describe(result: dict[str, Any]) -> str:
    """Say the result in lines."""
    lines = [
        f"{result['rounds']} rounds of {result['tokens']} tokens after {result['warmup']}; {result['slots']} of "
        f"{result['experts']} experts in slots; a read takes {result['read_ms']:.2f} ms "
        f"({result['gb_per_s']:.2f} GB/s)",
        f"{'arm':<13} {'tokens/s':>22} {'measured / limit':>22} {'MiB/token':>10} {'stall s':>8}",
    ]
    for name, arm in result["arms"].items():
        low, high = arm["tokens_per_s_range"]
        least, most = arm["measured_over_limit_range"]
        rest = f"{arm['mib_per_token']:>10.1f} {arm['stall_s']:>8.1f}" if "mib_per_token" in arm else ""
        rate = f"{arm['tokens_per_s']:.1f} ({low:.1f} to {high:.1f})"
        share = f"{arm['measured_over_limit']:.2f} ({least:.2f} to {most:.2f})"
        lines.append(f"{name:<13} {rate:>22} {share:>22} {rest}")
    low, high = result["over_lru_range"]
    return "\n".join(
        [
            *lines,
            f"foregate / lru {result['over_lru']:.2f} ({low:.2f} to {high:.2f}); the engine takes "
            f"{result['engine_ms_per_token']:.2f} ms a token where everything is held; no_predictor evicts by "
            f"{result['free_policy']}; outputs are {'identical' if result['identical'] else 'NOT IDENTICAL'} "
            "in all arms",
        ]
    )


def _dealt(trace: Trace, bundle: Bundle, wanted: int) -> tuple[list[Token], list[Token]]:
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


def _rows_of(tokens: Sequence[Token]) -> list[SequenceRouting]:
    """Make sequences of tokens again."""
    starts = [index for index, token in enumerate(tokens) if token.first or index == 0]
    rows = []
    for start, stop in zip(starts, [*starts[1:], len(tokens)], strict=True):
        part = tokens[start:stop]
        experts = np.stack([token.experts.reshape(-1) for token in part]).astype(np.int16)
        ids = np.array([token.token_id for token in part], np.int32)
        rows.append(SequenceRouting(sequence=str(start), stack="causal", experts=experts, token_ids=ids))
    return rows


def _token_spec(spec: PredictorSpec) -> PredictorSpec:
    return PredictorSpec(
        family="token_table", horizon="token", topology=spec.topology, stack=spec.stack, vocab_size=spec.vocab_size
    )


def _best_free(tokens: Sequence[Token], topology: MoeTopology, capacity: int) -> str:
    """Name the policy without a predictor that misses least on tokens."""
    events = [Event(needed, True) for token in tokens for needed in needed_of(token, topology) if needed]
    setting = PolicySetting(topology=topology, capacity=capacity)
    return min(FREE, key=lambda name: replay(events, capacity, make_policy(name, setting)).misses)


def _optimum(tokens: Sequence[Token], topology: MoeTopology, capacity: int, warmup: int, per_round: int) -> list[int]:
    """Give Belady's misses in each round, who knows all of them."""
    by_token = [[needed for needed in needed_of(token, topology) if needed] for token in tokens]
    cache = ExpertCache(capacity, Belady([needed for events in by_token for needed in events]))
    misses = [sum(len(cache.event(needed, one_token=True).misses) for needed in events) for events in by_token]
    counted = misses[warmup:]
    return [sum(counted[start : start + per_round]) for start in range(0, len(counted), per_round)]


def _fill(arena: SlotArena, blocks: ReplayBlocks, reader: Reader) -> None:
    for expert in range(blocks.topology.num_experts):
        (segment,) = blocks.segments(expert)
        reader.read_into(segment.file, segment.offset, arena.buffer(expert)[: segment.nbytes])


def _bytes(transfers: ThreadedTransfers) -> int:
    stats = transfers.stats()
    return stats.demand_bytes + stats.prefetch_bytes
