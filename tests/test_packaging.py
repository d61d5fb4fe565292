"""A wheel built from the tree and installed elsewhere holds everything and works, the demo included."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ["collect", "predictors", "runtime", "train", "cli", "configs"]

IMPORT_ALL = """
import importlib, json, sys
files = {}
for name in json.load(sys.stdin):
    files[name] = importlib.import_module(name).__file__
print(json.dumps(files))
"""


def shipped(tree: Path) -> set[str]:
    """List what a tree holds for the wheel, as paths inside it."""
    files = [path for folder in FOLDERS for path in (tree / folder).rglob("*") if path.is_file()]
    return {f"foregate/{path.relative_to(tree).as_posix()}" for path in files}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build a wheel from a copy of the tree, so that no old build folder is taken along."""
    copy = tmp_path_factory.mktemp("tree")
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy / name)
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(copy / "dist"), str(copy)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (built,) = (copy / "dist").glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the wheel, without what it depends on, into a folder of its own."""
    target = tmp_path_factory.mktemp("installed")
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--quiet", "--target", str(target)]
    subprocess.run([*command, str(wheel)], check=True)
    return target


def run(installed: Path, cwd: Path, *arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    """Run Python on the installed wheel; -S keeps the .pth file away that points at this tree."""
    paths = os.pathsep.join([str(installed), sysconfig.get_path("purelib"), sysconfig.get_path("platlib")])
    temporary = cwd.parent / f"{cwd.name}-temporary"  # torch makes folders of its own there
    temporary.mkdir(exist_ok=True)
    environment = {**os.environ, "PYTHONPATH": paths, "FOREGATE_SMOKE": "1", "TMPDIR": str(temporary)}
    command = [sys.executable, "-S", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=environment, check=False, **options)  # type: ignore[call-overload]


def test_wheel_holds_every_file_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    held = {name for name in names if ".dist-info/" not in name}
    assert held == shipped(wheel.parent.parent)
    assert any(name.startswith("foregate/configs/") and name.endswith(".yaml") for name in held)
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


def test_every_module_of_the_wheel_imports(wheel: Path, installed: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        paths = [name for name in archive.namelist() if name.endswith(".py") and not name.endswith("__main__.py")]
    modules = sorted(path.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for path in paths)
    done = run(installed, tmp_path, "-c", IMPORT_ALL, input=json.dumps(modules))
    assert done.returncode == 0, done.stderr
    files = json.loads(done.stdout)  # so no import printed anything
    assert done.stderr == ""
    assert {name for name, file in files.items() if not Path(file).is_relative_to(installed)} == set()
    assert set(files) == set(modules)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("module", ["foregate.cli", "foregate.cli.main"])
def test_program_runs_from_the_wheel(installed: Path, tmp_path: Path, module: str) -> None:
    done = run(installed, tmp_path, "-m", module, "--help")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage: foregate")
    assert run(installed, tmp_path, "-m", module, "--version").stdout.startswith("foregate ")


def test_wheel_names_the_program(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith("entry_points.txt")]
        assert "foregate = foregate.cli.main:main" in archive.read(name).decode()


def test_demo_runs_from_the_wheel(installed: Path, tmp_path: Path) -> None:
    done = run(installed, tmp_path, "-m", "foregate.cli", "demo", "--json")
    assert done.returncode == 0, done.stderr
    value = json.loads(done.stdout)
    assert not list(tmp_path.parent.rglob("foregate-demo-*")), "the store was left behind"
    assert value["identical"] is True
    assert set(value["arms"]) >= {"resident", "lru", "foregate"}
    metrics = {"tokens_per_s", "bytes_per_token", "hits", "delayed_hits", "misses", "on_time_share", "stall_s"}
    for arm in value["arms"].values():
        assert {*metrics, "measured_over_limit"} <= set(arm)
