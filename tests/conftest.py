"""What every test stands on: no network, no tracking server, process-wide settings restored after each test.

Besides, a browser, and `fork` for tests that want Python programs in processes of their own: forks of a server that
has imported, once, what takes ten seconds. What an import itself does is tested elsewhere, in processes that start from
nothing.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing.forkserver import ensure_running
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
LONGEST = (  # half a minute or more each
    "runtime/test_families.py",
    "test_readme.py",
    "predictors/test_contract.py",
    "test_packaging.py",
    "train/test_init.py",
    "runtime/test_verify.py",
    "runtime/test_load.py",
    "train/test_fit.py",
    "runtime/test_inflate.py",
    "collect/test_ranks.py",
)

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when huggingface_hub is imported
os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("WANDB_SILENT", "true")
os.environ.setdefault("MPLBACKEND", "agg")
os.environ.setdefault("NO_COLOR", "1")  # help texts are compared with a snapshot
os.environ.setdefault("COLUMNS", "120")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # on a busy machine spinning threads took 26 s where this took 0.7


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options that renew what is written from the program itself."""
    parser.addoption("--freeze-cli", action="store_true", help="write tests/cli_flags.json anew")
    parser.addoption("--freeze-files", action="store_true", help="write docs/files.md anew")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that take longest, so that no worker is left alone with one at the end."""
    places = {ROOT / "tests" / name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path, len(places)))


def pytest_collection_finish() -> None:
    """Let garbage collections pass over what imports have made, a million objects or so, which stay anyway."""
    import hypothesis  # pytest would do so later, and hypothesis looks for an object that is then hidden from it

    assert hypothesis
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def root() -> Path:
    """Give the repository root."""
    return ROOT


@pytest.fixture(scope="session")
def shared() -> Path:
    """Give the folder of real traces and texts, or skip."""
    folder = Path(os.environ.get("FOREGATE_SHARED", ROOT.parent / "shared"))
    if not (folder / "traces").is_dir():
        pytest.skip(f"no real traces under FOREGATE_SHARED={folder}")
    return folder


@pytest.fixture(autouse=True)
def _global_state() -> Iterator[None]:
    """Restore what a test may change for all others; torch is looked at only where a test has imported it."""
    folder, environment = Path.cwd(), dict(os.environ)
    torch = sys.modules.get("torch")
    before = (torch.get_default_dtype(), torch.get_num_threads()) if torch else None
    yield
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    if torch and before:
        torch.set_default_dtype(before[0])
        if torch.get_num_threads() != before[1]:
            torch.set_num_threads(before[1])


IMPORTED = [
    "transformers.generation.utils",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
    "torch.onnx._internal.exporter._core",
    "torch.distributed.launcher.api",
    "foregate.collect.collection",
    "foregate.train.fit",
]

# In a fork: `python WORDS`, or `torchrun --nproc-per-node RANKS WORDS` whose ranks are forks as well.
CHILD = """
import atexit, gc, os, runpy, sys, uuid

gc.freeze()
os.chdir(cwd)
os.environ.clear()
os.environ.update(env)
for number, path in enumerate((out, err), start=1):
    os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND), number)

def program():
    if words[0] == "-c":
        sys.argv[:] = ["-c", *words[2:]]
        exec(compile(words[1], "<string>", "exec"), {"__name__": "__main__"})
    elif words[0] == "-m":
        sys.argv[:] = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv[:] = words
        runpy.run_path(words[0], run_name="__main__")

def rank():
    try:
        program()
    except SystemExit as error:
        if error.code:
            raise
    finally:
        atexit._run_exitfuncs()

def torchrun():
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    meeting = {"rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0", "run_id": str(uuid.uuid4())}
    try:
        elastic_launch(LaunchConfig(1, 1, ranks, start_method="fork", max_restarts=0, **meeting), rank)()
    except ChildFailedError:
        sys.exit(1)

if ranks:
    torchrun()
else:
    try:
        program()
    finally:
        atexit._run_exitfuncs()
"""


class Forked:
    """A Python program that runs in a fork; what it prints goes to files in `folder`."""

    def __init__(self, process: BaseProcess, folder: Path) -> None:
        self.process, self.folder = process, folder

    def finish(self, timeout: float = 600) -> subprocess.CompletedProcess[str]:
        """Wait for its end and give what it printed; one that takes too long is killed, as its exit code says."""
        self.process.join(timeout)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        code = self.process.exitcode
        assert code is not None
        out, err = ((self.folder / name).read_text(encoding="utf-8", errors="replace") for name in ("out", "err"))
        return subprocess.CompletedProcess(self.folder, code, out, err)


class Fork:
    """Starts Python programs as forks of a server."""

    def __init__(self, folders: pytest.TempPathFactory) -> None:
        self.context, self.folders = multiprocessing.get_context("forkserver"), folders
        self.context.set_forkserver_preload(IMPORTED)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("OMP_NUM_THREADS", "1")  # read when torch is imported
            ensure_running()

    def start(self, *words: str, cwd: Path | None = None, env: dict[str, str] | None = None, ranks: int = 0) -> Forked:
        """Start `python WORDS`, where the words are a file, -m MODULE or -c CODE, and what follows; or `torchrun`."""
        folder = self.folders.mktemp("fork")
        for name in ("out", "err"):
            (folder / name).touch()
        given: dict[str, Any] = {"words": words, "ranks": ranks, "cwd": str(cwd or Path.cwd())}
        given |= {
            "env": dict(os.environ if env is None else env),
            "out": str(folder / "out"),
            "err": str(folder / "err"),
        }
        process = self.context.Process(target=exec, args=(CHILD, given))
        process.start()
        return Forked(process, folder)

    def run(self, *words: str, timeout: float = 600, **options: Any) -> subprocess.CompletedProcess[str]:
        """Start one, wait for its end and give what it printed."""
        return self.start(*words, **options).finish(timeout)


@pytest.fixture(scope="session")
def fork(tmp_path_factory: pytest.TempPathFactory) -> Fork:
    """Start Python programs without waiting for what they import."""
    return Fork(tmp_path_factory)


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Start a headless Chromium, or skip where there is none."""
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip("no chromium and chromedriver (make browser installs them)")
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--window-size=1200,900",
    ):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    started = webdriver.Chrome(options=options, service=Service(driver))
    try:
        yield started
    finally:
        started.quit()
