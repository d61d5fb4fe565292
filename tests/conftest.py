"""What every test stands on: no network, no tracking server, process-wide settings restored after each test."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

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
