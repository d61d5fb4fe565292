"""All arms of a replay over one file of experts and one list of tokens, served in turns, and their report.

Knows engines, predictors and the link; what is compared and why, `replay` says.
"""

from __future__ import annotations

import contextlib
import statistics
from typing import Any

from ...collect.topology import MoeTopology
from ...predictors.base import PredictorSpec
from ...predictors.baselines import TokenTable
from ...predictors.bundle import Bundle, load_predictor
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
from ..slots import SlotArena
from ..steps import StepTracker
from ..transfer import ThreadedTransfers
from .limit import LinkProbe
from .machine import machine
from .replay_arm import Foreknown, ReplayArm, Steps, Token, counts_of
from .replay_blocks import ReplayBlocks
from .replay_tokens import best_free, events_of_tokens, optimum_of, rows_of

PROBATION = 0.1  # of the slots: RuntimeConfig's


class Race:
    """All arms over one file of experts and one list of tokens."""

    def __init__(
        self,
        blocks: ReplayBlocks,
        tokens: list[Token],
        stack: contextlib.ExitStack,
        *,
        share: float,
        threads: int,
    ) -> None:
        self.threads, self.blocks, self.tokens, self.stack = threads, blocks, tokens, stack
        self.topology: MoeTopology = blocks.topology
        self.clock = SystemClock()
        self.capacity = int(share * self.topology.num_experts)
        self.events = events_of_tokens(tokens, self.topology)
        self.reader = open_reader(blocks.files, "auto")
        stack.callback(self.reader.close)
        self.probe = LinkProbe(blocks, self.reader, num_threads=threads)
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
        self.free_policy = best_free(seen, self.topology, self.capacity)
        setting = PolicySetting(topology=self.topology, capacity=self.capacity)
        table = TokenTable(_token_spec(spec)).fit(rows_of(seen))
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
        transfers = ThreadedTransfers(blocks, arena.buffer, self.reader, num_threads=self.threads)
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
        optimum = optimum_of(self.tokens, self.topology, self.capacity, warmup, per_round)
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


def _token_spec(spec: PredictorSpec) -> PredictorSpec:
    return PredictorSpec(
        family="token_table", horizon="token", topology=spec.topology, stack=spec.stack, vocab_size=spec.vocab_size
    )


def _fill(arena: SlotArena, blocks: ReplayBlocks, reader: Reader) -> None:
    for expert in range(blocks.topology.num_experts):
        (segment,) = blocks.segments(expert)
        reader.read_into(segment.file, segment.offset, arena.buffer(expert)[: segment.nbytes])


def _bytes(transfers: ThreadedTransfers) -> int:
    stats = transfers.stats()
    return stats.demand_bytes + stats.prefetch_bytes
