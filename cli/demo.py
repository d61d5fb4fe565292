"""Show the whole flow on a mini model: collect, train, export, inflate, pack, and generate three ways."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import logging
import os
import platform
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..collect.errors import DataError, SettingError
from ..collect.smoke import smoke

log = logging.getLogger(__name__)

MODEL = "foregate-mini"
PROMPT_CHARACTERS = 160  # about 40 tokens: a prefill that needs most experts of a layer
TABLE_WIDTH = 150  # of ten columns; a narrower terminal wraps lines rather than cutting numbers off
HELD_OUT = 0.2  # share of the documents that neither recording nor training sees; prompts come from these


@dataclass(frozen=True, kw_only=True)
class DemoConfig:
    """Show the whole flow on a mini model: collect, train, export, inflate, pack, and generate three ways."""

    text: str | None = None
    """Text, .jsonl, .tsv or .csv file to use in place of the documentation topics that Python ships."""
    report: str = "report.html"
    """Where the report goes."""
    slots: float = 0.25
    """Share of the experts in slots."""
    expert_mib: float = 6.0
    """MiB per expert after widening; the power of two that comes closest is taken."""
    passes: int = 5
    """Interleaved passes over the prompts."""
    prompts: int = 3
    """Prompts per pass."""
    new_tokens: int = 32
    """Tokens generated per prompt."""
    train_minutes: float = 0.8
    """Most minutes for training."""
    seed: int = 0
    """Seed of training and of sampling."""

    def __post_init__(self) -> None:
        for name in ("passes", "prompts", "new_tokens"):
            if getattr(self, name) < 1:
                raise SettingError(f"{name} must be at least 1, got {getattr(self, name)}.")
        if not 0 < self.slots <= 1:
            raise SettingError(f"slots must be a share in (0, 1], got {self.slots}.")
        if not 0 < self.train_minutes <= 60:
            raise SettingError(f"train_minutes must lie in (0, 60], got {self.train_minutes}.")


def parser() -> Any:
    """Build the command line."""
    from .options import settings_parser

    return settings_parser("foregate demo", DemoConfig)


def run(args: Any) -> int:
    """Run the demo; exit code 1 where the texts differ."""
    from .options import settings_from

    result = demo(settings_from(args, DemoConfig))
    if args.json:
        print(json.dumps(result, indent=2))
    else:
        _print_table(result)
    return 0 if result["identical"] else 1


def demo(config: DemoConfig) -> dict[str, Any]:
    """Run every step in a temporary folder and give the numbers of the three arms."""
    from ..runtime.bench.comparison import ComparisonConfig, compare

    start = time.perf_counter()
    report = Path(config.report)
    if not report.parent.is_dir():
        raise SettingError(f"{report.parent} is no folder; give --report a path in an existing folder.")
    with tempfile.TemporaryDirectory(prefix="foregate-demo-") as folder:
        work = Path(folder)
        prompts = _hold_out(config, work)
        bundle = _train(config, work)
        model, store, factor = _build_store(config, work)
        with _step("generate"):
            result = compare(
                model,
                store,
                work / "bundle",
                prompts,
                ComparisonConfig(
                    slots=config.slots,
                    passes=smoke(config.passes, 2),
                    new_tokens=smoke(config.new_tokens, 8),
                    seed=config.seed,
                ),
                progress=lambda arm, index: log.info("pass %d: %s", index + 1, arm),
            )
        result["predictor"] = bundle
        result["inflated"] = factor
        result["seconds"] = round(time.perf_counter() - start, 1)
        _write_report(config, report, work / "trace", result)
    result["report"] = str(report)
    return result


def _hold_out(config: DemoConfig, work: Path) -> list[str]:
    """Write the documents to record on to a file and give prompts from the others."""
    from ..collect.corpora import open_corpus

    texts = [item.text for item in open_corpus(config.text or "topics") if len(item.text) >= PROMPT_CHARACTERS]
    kept = int(len(texts) * (1 - HELD_OUT))
    if kept < 4 or len(texts) - kept < config.prompts:
        raise DataError(
            f"{config.text or 'topics'} has {len(texts)} texts of at least {PROMPT_CHARACTERS} characters; the demo "
            f"needs about {int(config.prompts / HELD_OUT) + 5}: give a longer text or fewer prompts."
        )
    with open(work / "texts.jsonl", "w", encoding="utf-8") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in texts[:kept])
    return [text[:PROMPT_CHARACTERS] for text in texts[kept : kept + config.prompts]]


def _train(config: DemoConfig, work: Path) -> dict[str, Any]:
    from ..collect.collection import CollectConfig, collect
    from ..runtime import models
    from ..train.fit import train

    with _step("collect"):
        collect(
            CollectConfig(
                model=str(models.path(MODEL)),
                data=str(work / "texts.jsonl"),
                out=str(work / "trace"),
                max_sequences=smoke(200, 24),
                max_tokens=256,
                batch_size=8,
                seed=config.seed,
            )
        )
    with _step("train and export"):
        return train(work / "trace", work / "bundle", max_minutes=smoke(config.train_minutes, 0.02), seed=config.seed)


def _build_store(config: DemoConfig, work: Path) -> tuple[Path, Path, int]:
    from ..runtime import models
    from ..runtime.inflate import inflate
    from ..runtime.pack import pack

    with _step("inflate"):
        inflation = inflate(models.path(MODEL), work / "model", expert_mib=smoke(config.expert_mib, 0.4))
    with _step("pack"):
        pack(work / "model", work / "store")
    return work / "model", work / "store", inflation.factor


@contextlib.contextmanager
def _step(name: str) -> Iterator[None]:
    start = time.perf_counter()
    log.info("%s ..", name)
    yield
    log.info("%s: %.1f s", name, time.perf_counter() - start)


def _cells(result: dict[str, Any]) -> list[dict[str, str]]:
    """Format one row per arm."""
    rows = []
    for name, arm in result["arms"].items():
        low, high = arm["tokens_per_s_range"]
        on_time = arm["on_time_share"]
        rows.append(
            {
                "arm": name,
                "tokens/s": f"{arm['tokens_per_s']:.1f} ({low:.1f}-{high:.1f})",
                "first token, s": f"{arm['ttft_s']:.2f}",
                "MiB read/token": f"{arm['bytes_per_token'] / 2**20:.1f}",
                "hits": str(arm["hits"]),
                "delayed hits": str(arm["delayed_hits"]),
                "misses": str(arm["misses"]),
                "on time": "-" if on_time is None else f"{on_time:.0%}",
                "stall, s": f"{arm['stall_s']:.1f}",
                "measured/limit": f"{arm['measured_over_limit']:.2f}",
            }
        )
    return rows


def _summary(result: dict[str, Any]) -> list[str]:
    store = result["store"]
    same = "identical to" if result["identical"] else "DIFFERENT from"
    metrics = result["predictor"]["metrics"]
    best = max(metrics["baselines"].items(), key=lambda item: item[1])
    return [
        f"The texts of lru and foregate are {same} those of the resident model.",
        f"{MODEL} inflated {result['inflated']} x: {store['experts']} experts of {store['block_mib']:.2f} MiB "
        f"({store['gib']:.2f} GiB), {store['slots']} in slots; one read takes {store['read_ms']:.1f} ms "
        f"({store['gb_per_s']:.2f} GB/s, {store['reader']}; passes run on the cache that the one before left).",
        f"Predictor {result['predictor']['family']}: recall {metrics['recall_at_k']:.3f} on held-out sequences "
        f"({best[0]} {best[1]:.3f}); {result['mode']}: {result['reason']}.",
    ]


def _print_table(result: dict[str, Any]) -> None:
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table

    rows = _cells(result)
    table = Table(box=SIMPLE, pad_edge=False)
    for index, name in enumerate(rows[0]):
        table.add_column(name, justify="left" if index == 0 else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row.values())
    console = Console(file=sys.stdout, width=TABLE_WIDTH, soft_wrap=True)
    console.print(table)
    for line in _summary(result):
        console.print(line, markup=False, highlight=False)
    console.print(f"Report: {result['report']}", markup=False, highlight=False)


def _write_report(config: DemoConfig, path: Path, trace: Path, result: dict[str, Any]) -> None:
    import numpy as np

    from ..collect.trace import Trace
    from ..runtime.report import heat_map, hit_rates, write_report

    recorded = Trace.open(trace)
    topology = recorded.topology
    load_LE = np.zeros((topology.num_layers, topology.max_experts))
    for row in recorded:
        for layer, experts in zip(topology.layers_of(row.stack), row.layer_experts(topology), strict=True):
            load_LE[layer] += np.bincount(experts[experts >= 0].ravel(), minlength=load_LE.shape[1])
    lines = {name: arm["layer_hit_rates"] for name, arm in result["arms"].items() if arm["layer_hit_rates"]}
    versions = {name: importlib.metadata.version(name) for name in ("foregate", "torch", "transformers", "onnxruntime")}
    write_report(
        path,
        title="foregate demo",
        summary=_summary(result),
        table=_cells(result),
        figures=[
            (
                "Routing: share of each MoE layer's choices that every expert got, on the recorded text.",
                heat_map(load_LE),
            ),
            ("Hit rate by MoE layer.", hit_rates(lines)),
        ],
        settings={**asdict(config), **versions, "machine": platform.machine(), "cores": os.cpu_count()},
    )
