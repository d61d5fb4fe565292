"""Compare the resident model, LRU and foregate on one store: the same prompts, slots and threads, interleaved."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import transformers

from ...collect.errors import SettingError
from ..alignment import align_weights
from ..loading import load
from ..stats import RuntimeStats
from .arms import Arm, run_arms
from .limit import LinkProbe, limit_s


@dataclass(frozen=True, kw_only=True)
class ComparisonConfig:
    """Say how much is generated."""

    slots: float | int = 0.25
    """Expert slots of the offloaded arms, as a share or a number."""
    passes: int = 5
    """Interleaved passes over the prompts."""
    new_tokens: int = 32
    """Tokens generated per prompt."""
    seed: int = 0
    """Seed of sampling."""

    def __post_init__(self) -> None:
        for name in ("passes", "new_tokens"):
            if getattr(self, name) < 1:
                raise SettingError(f"{name} must be at least 1, got {getattr(self, name)}.")


def compare(
    model: str | Path,
    store: str | Path,
    bundle: str | Path,
    prompts: Sequence[str],
    config: ComparisonConfig,
    progress: Callable[[str, int], None] = lambda arm, index: None,
) -> dict[str, Any]:
    """Generate with the three arms and give their numbers; the first prompts warm every arm up and are not counted.

    Args:
        model: checkpoint whose experts the store holds.
        bundle: predictor of the foregate arm.
        progress: told the arm and the pass that begin.
    """
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(store))
    ids = [tokenizer(prompt, return_tensors="pt").input_ids for prompt in prompts]
    with contextlib.ExitStack() as stack:
        resident = transformers.AutoModelForCausalLM.from_pretrained(str(model), experts_implementation="grouped_mm")
        align_weights(resident)
        offloaded = {
            "lru": load(store, slots=config.slots),
            "foregate": load(store, slots=config.slots, predictor=bundle),
        }
        for item in offloaded.values():
            stack.callback(item.foregate.close)
        arms = {name: Arm(model=item) for name, item in {"resident": resident, **offloaded}.items()}
        run_arms(arms, ids, new_tokens=2, passes=1, seed=config.seed)
        for arm in arms.values():
            arm.passes.clear()
        for item in offloaded.values():
            item.foregate.reset_stats()
            item.foregate.engine.events_log = []
        lru = offloaded["lru"].foregate
        probe = LinkProbe(lru.store, lru.reader, num_threads=lru.config.threads)
        stack.callback(probe.close)
        run_arms(
            arms,
            ids,
            new_tokens=config.new_tokens,
            passes=config.passes,
            seed=config.seed,
            between=probe,
            progress=progress,
        )
        handles = {name: item.foregate for name, item in offloaded.items()}
        rows = {"resident": _row(arms["resident"], None, arms["resident"].seconds)}
        for name, handle in handles.items():
            limit = limit_s(
                handle.engine.events_log or [], handle.stats().slots, arms["resident"].seconds, probe.median_s
            )
            rows[name] = _row(arms[name], handle.stats(), limit)
        rows["resident"]["hits"] = sum(rows["lru"][name] for name in ("hits", "delayed_hits", "misses"))
        stats = handles["foregate"].stats()
        return {
            "identical": all(arm.texts == arms["resident"].texts for arm in arms.values()),
            "arms": rows,
            "mode": stats.mode,
            "reason": stats.reason,
            "forecast_recall": stats.forecast_recall,
            "predictor_ms": stats.predictor_ms,
            "store": {
                "experts": stats.experts,
                "slots": stats.slots,
                "block_mib": stats.block_bytes / 2**20,
                "gib": stats.experts * stats.block_bytes / 2**30,
                "reader": stats.reader,
                "read_ms": 1e3 * probe.median_s,
                "gb_per_s": stats.block_bytes / probe.median_s / 1e9,
            },
            "text": tokenizer.decode(arms["foregate"].passes[0][0].token_ids),
        }


def _row(arm: Arm, stats: RuntimeStats | None, limit: float) -> dict[str, Any]:
    rates = arm.tokens_per_s
    row: dict[str, Any] = {
        "tokens_per_s": statistics.median(rates),
        "tokens_per_s_range": [min(rates), max(rates)],
        "ttft_s": arm.ttft_s,
        "tpot_s": arm.tpot_s,
        "bytes_per_token": 0.0,
        "hits": 0,
        "delayed_hits": 0,
        "misses": 0,
        "on_time_share": None,
        "stall_s": 0.0,
        "measured_over_limit": arm.seconds / limit,
        "layer_hit_rates": [],
    }
    if stats is not None:
        row |= {name: getattr(stats, name) for name in ("hits", "delayed_hits", "misses", "on_time_share", "stall_s")}
        row["bytes_per_token"] = stats.bytes_per_token
        row["layer_hit_rates"] = [
            layer.hits / max(1, layer.hits + layer.delayed_hits + layer.misses) for layer in stats.per_layer
        ]
    return row
