"""Imports flow one way, importing is cheap and silent, and the runtime polls nothing."""

from __future__ import annotations

import ast
import functools
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ORDER = ["collect", "predictors", "runtime", "train", "cli"]  # each may import itself and what stands before it
FOLDERS = [*ORDER, "configs"]
FILES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
PURE = {"policies", "cache", "replay", "models"}  # what train may use of the runtime
HEAVY = {"lightning", "pytorch_lightning", "wandb", "sklearn", "sru", "datasets", "onnxruntime", "matplotlib"}
MOST_CPU_S = 3.0


@functools.cache
def tree_of(path: Path) -> ast.Module:
    """Parse a file."""
    return ast.parse(path.read_text(encoding="utf-8"))


def name_of(path: Path) -> str:
    """Give a file's dotted module name under `foregate`."""
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path: Path) -> list[tuple[int, str]]:
    """List (line, absolute dotted name) of everything that a file imports, at any depth of nesting."""
    package = list(path.relative_to(ROOT).parent.parts)
    found = []
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level:
            assert node.level <= len(package) + 1, f"{path}:{node.lineno} reaches above foregate"
            base = ["foregate", *package[: len(package) - node.level + 1], *filter(None, [node.module])]
            found += [(node.lineno, ".".join([*base, alias.name])) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found += [(node.lineno, f"{node.module}.{alias.name}") for alias in node.names]
    return found


def calls_of(path: Path) -> list[tuple[int, str]]:
    """List (line, source text of the callee) of every call in a file."""
    return [(node.lineno, ast.unparse(node.func)) for node in ast.walk(tree_of(path)) if isinstance(node, ast.Call)]


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_imports_keep_the_order(path: Path) -> None:
    folder = path.relative_to(ROOT).parts[0]
    legal = [] if folder == "configs" else ORDER[: ORDER.index(folder) + 1]
    if folder in ("train", "cli"):
        legal.append("configs")
    for line, name in imports_of(path):
        parts = name.split(".")
        assert parts[0] not in FOLDERS, f"{path}:{line} imports {name} without the namespace: write a relative import"
        if parts[0] != "foregate":
            continue
        assert set(parts[1:2]) <= set(legal), f"{path}:{line}: {folder} must not import {name}; legal: {legal}"
        if folder == "train" and parts[1] == "runtime":
            assert set(parts[2:3]) <= PURE, f"{path}:{line}: train uses only {sorted(PURE)} of the runtime"


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_imports_inside_are_relative_and_resolve(path: Path) -> None:
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            bad = [alias.name for alias in node.names if alias.name.split(".")[0] == "foregate"]
            assert not bad, f"{path}:{node.lineno} imports {bad}: write a relative import"
        if isinstance(node, ast.ImportFrom):
            absolute = not node.level and (node.module or "").split(".")[0] == "foregate"
            assert not absolute, f"{path}:{node.lineno} imports from {node.module}: write a relative import"
            if node.level:
                base = path.parents[node.level - 1].joinpath(*(node.module or "").split("."))
                exists = base.with_suffix(".py").is_file() or base.is_dir()
                assert exists, f"{path}:{node.lineno}: there is no {base.relative_to(ROOT)}"


def test_pure_parts_of_the_runtime_know_no_tensors_threads_or_clocks() -> None:
    pure = [path for path in FILES if path.relative_to(ROOT).parts[0] == "runtime"]
    pure = [path for path in pure if name_of(path).split(".")[1:2] and name_of(path).split(".")[1] in PURE]
    assert pure
    for path in pure:
        tops = {name.split(".")[0] for _, name in imports_of(path)}
        assert not tops & {"torch", "transformers", "threading", "time", "concurrent", "queue"}, path


PROBE = """
import json, resource, sys
before = resource.getrusage(resource.RUSAGE_SELF)
import importlib, logging, threading, warnings
filters = list(warnings.filters)
importlib.import_module(sys.argv[1])
after = resource.getrusage(resource.RUSAGE_SELF)
print(json.dumps({
    "cpu_s": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
    "modules": sorted({name.partition(".")[0] for name in sys.modules}),
    "handlers": len(logging.getLogger().handlers),
    "threads": threading.active_count(),
}))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="CPU seconds are read through the resource module")
@pytest.mark.parametrize(
    ("name", "unwanted"),
    [
        ("foregate.collect", HEAVY | {"torch", "transformers"}),
        ("foregate.predictors", HEAVY | {"torch", "transformers"}),
        ("foregate.runtime", HEAVY),
        ("foregate.train", HEAVY),
        ("foregate.configs", HEAVY | {"torch", "transformers"}),
        ("foregate.cli.main", HEAVY | {"torch", "transformers", "jsonargparse"}),
    ],
)
def test_import_is_silent_quick_and_light(name: str, unwanted: set[str], tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROBE, name], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    report = json.loads(done.stdout)  # one JSON line: the import itself printed nothing
    assert not unwanted & set(report["modules"])
    assert report["cpu_s"] < MOST_CPU_S
    assert report["handlers"] == 0
    assert report["threads"] == 1


@pytest.mark.parametrize("path", [path for path in FILES if path.is_relative_to(ROOT / "runtime")], ids=name_of)
def test_the_runtime_never_sleeps(path: Path) -> None:
    asleep = [line for line, name in calls_of(path) if name.split(".")[-1] == "sleep"]
    assert not asleep, f"{path}:{asleep}: wait on a handle or a condition instead"
    assert "time.sleep" not in {name for _, name in imports_of(path)}


@pytest.mark.parametrize("path", [path for path in FILES if not path.is_relative_to(ROOT / "cli")], ids=name_of)
def test_library_code_prints_nothing(path: Path) -> None:
    prints = [line for line, name in calls_of(path) if name in ("print", "sys.stdout.write", "rich.print")]
    assert not prints, f"{path}:{prints}: log, or return the value"


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_no_code_changes_the_process_when_imported(path: Path) -> None:
    tree = tree_of(path)
    inside = {
        id(child)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.walk(node)
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        assert name not in ("logging.basicConfig", "basicConfig"), (
            f"{path}:{node.lineno}: the root logger is the user's"
        )
        assert name != "logging.getLogger().addHandler", f"{path}:{node.lineno}: the root logger is the user's"
        if id(node) not in inside:
            changes = name in ("warnings.filterwarnings", "warnings.simplefilter", "torch.set_num_threads")
            assert not changes, f"{path}:{node.lineno}: {name} when imported"
