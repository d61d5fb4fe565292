"""Measure one part of foregate on this machine.

A benchmark is a file of runtime/bench/ with a settings class, `bench(settings)` that gives a JSON value with "arms" and
"machine", and `describe(result)` that says it in lines. It joins by one entry of BENCHMARKS. Those of train/bench/ may
not look into the runtime, so they are told the machine: `bench(settings, machine)`.
"""

from __future__ import annotations

import importlib
import json
from types import ModuleType
from typing import Any

from .options import settings_from, settings_parser
from .replay_predictor import with_predictor

# name: the package that its file is in, and its settings class
BENCHMARKS: dict[str, tuple[str, str]] = {
    "epoch": ("train", "EpochBench"),
    "hardware": ("runtime", "HardwareBench"),
    "predictors": ("train", "PredictorsBench"),
    "record": ("runtime", "RecordBench"),
    "replay": ("runtime", "ReplayBench"),
    "simulate": ("runtime", "SimulateBench"),
}


def parser() -> Any:
    """Build the parser of `foregate bench`, with one sub-command per benchmark."""
    import jsonargparse

    made = jsonargparse.ArgumentParser(
        prog="foregate bench",
        description="Measure one part of foregate on this machine.",
        exit_on_error=False,  # sub-commands take it over: an ArgumentError instead of a usage dump
    )
    names = made.add_subcommands(dest="benchmark", metavar="NAME", help="what to measure")
    for name in BENCHMARKS:
        below = settings_parser(f"foregate bench {name}", _settings(name))
        names.add_subcommand(name, below, help=" ".join(str(below.description).split()))
        below.prog = f"foregate bench {name}"
    return made


def run(args: Any) -> int:
    """Run the benchmark and print its numbers."""
    name = args.benchmark
    values = args[name]
    result = _bench(name, settings_from(values, _settings(name)))
    print(json.dumps(result) if values.json else _module(name).describe(result))
    return 0


def _bench(name: str, settings: Any) -> dict[str, Any]:
    if name == "replay":
        with with_predictor(settings) as complete:
            return _module(name).bench(complete)
    if BENCHMARKS[name][0] == "runtime":
        return _module(name).bench(settings)
    from ..runtime.bench.machine import machine

    return _module(name).bench(settings, machine())


def _module(name: str) -> ModuleType:
    return importlib.import_module(f"..{BENCHMARKS[name][0]}.bench.{name}", __package__)


def _settings(name: str) -> type:
    return getattr(_module(name), BENCHMARKS[name][1])
