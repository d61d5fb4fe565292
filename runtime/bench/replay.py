"""The engine driven by recorded routing: real reads, real matrix products, no model. Every arm in one run, in turns.

Each round serves other tokens than the one before, the same in all arms, and the cache goes on as the round before left
it; a warm-up comes first and is not counted. The limit of a round is max(its time where everything is resident, the
misses of Belady's optimum in it x the time of a read, probed in the same round).
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...collect.errors import DataError, SettingError
from ...collect.smoke import smoke
from ...collect.trace import Trace
from ...predictors.bundle import Bundle
from .replay_blocks import ReplayBlocks
from .replay_race import Race
from .replay_tokens import deal_tokens

TRACE = "gpt-oss-20b_mixed.npz"


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
    seen, tokens = deal_tokens(trace, bundle, warmup + rounds * per_round)
    folder = Path(settings.folder)
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        path = folder / f"experts-{os.getpid()}.bin"
        stack.callback(path.unlink, missing_ok=True)
        blocks = ReplayBlocks(path, trace.topology, int(settings.block_mib * 2**20))
        blocks.write()
        race = Race(blocks, tokens, stack, share=settings.slots, threads=settings.threads)
        race.add_arms(bundle, seen)
        return race.run(warmup, per_round, rounds)


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
