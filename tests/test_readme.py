"""What a reader of the README may run is run, in one folder and in order; what it lists exists."""

from __future__ import annotations

import ast
import itertools
import os
import pydoc_data.topics
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from foregate.cli.main import commands

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]
FOLDERS = ["collect", "predictors", "runtime", "train", "cli", "configs"]
MOST_LINES = 250
UNRUN = ("make", "git", "cd", "pip", "python -m pip", ". ")  # installation; the commands that follow stand on it
RUN_ELSEWHERE = ("foregate demo",)  # from the wheel, in test_packaging.py
TIMEOUT_S = 240


def blocks(page: Path, language: str) -> list[str]:
    """Give a page's fenced blocks of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def shell_commands(page: Path) -> Iterator[str]:
    """Give the commands of a page's bash blocks, continued lines joined, comments and installation left out."""
    for block in blocks(page, "bash"):
        for line in block.replace("\\\n", " ").splitlines():
            command = re.sub(r"(?:^|\s+)#.*$", "", line).strip()
            if command and not command.startswith(UNRUN):
                yield command


def tree() -> dict[str, str]:
    """Read the README's file tree as path -> what it says of it."""
    (block,) = [block for block in blocks(README, "text") if block.startswith("collect/")]
    found, parents = {}, []
    for line in block.splitlines():
        match = re.fullmatch(r"(?P<indent> *)(?P<name>\S+)(?: +(?P<text>.+))?", line)
        assert match, f"no line of the tree: {line!r}"
        depth = len(match["indent"]) // 2
        parents[depth:] = [match["name"].rstrip("/")]
        found["/".join(parents)] = match["text"] or ""
    return found


def test_readme_is_short() -> None:
    assert len(README.read_text(encoding="utf-8").splitlines()) < MOST_LINES


def source_files() -> list[Path]:
    """List every module and config."""
    found = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".yaml")]
    return sorted(found, key=lambda path: (FOLDERS.index(path.relative_to(ROOT).parts[0]), path.parent, path.name))


def first_line(path: Path) -> str:
    """Give the first sentence of what a file says of itself: its docstring, or the comment at the top of a config."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        text = ast.get_docstring(ast.parse(text)) or ""
    else:
        text = "\n".join(
            line[1:].strip() for line in itertools.takewhile(lambda line: line[:1] == "#", text.splitlines())
        )
    return " ".join(text.partition("\n\n")[0].split()).partition(". ")[0].rstrip(".:")


def page_of_files() -> str:
    """Write docs/files.md: every file below its folder, with its own first line."""
    lines = [
        "# Every file",
        "",
        "Written from the first line of each file: `pytest tests/test_readme.py --freeze-files`.",
    ]
    folder = None
    for path in source_files():
        place = path.parent.relative_to(ROOT).as_posix()
        own = path if path.name == "__init__.py" else None
        if place != folder:
            folder = place
            lines += ["", f"## {place}/", ""]
            if own is not None:
                lines += [first_line(own), ""]
            lines += ["| file | what it is |", "|---|---|"]
        if own is None:
            lines.append(f"| `{path.name}` | {first_line(path).replace('|', chr(92) + '|')} |")
    return "\n".join(lines) + "\n"


def test_tree_lists_every_folder_with_a_line_each() -> None:
    listed = tree()
    there = {path.parent.relative_to(ROOT).as_posix() for path in source_files()}
    assert sorted(there - set(listed)) == [], "not in the README's tree"
    assert [path for path in listed if not (ROOT / path).exists()] == [], "in the README's tree only"
    assert [path for path, text in listed.items() if len(text.split()) < 2] == [], "without a word about it"


def test_page_of_files_lists_every_file_with_its_own_first_line(request: pytest.FixtureRequest) -> None:
    page = ROOT / "docs" / "files.md"
    if request.config.getoption("--freeze-files"):
        page.write_text(page_of_files(), encoding="utf-8")
    assert [str(path) for path in source_files() if len(first_line(path).split()) < 2] == [], "without a word about it"
    assert page.read_text(encoding="utf-8") == page_of_files(), "run pytest tests/test_readme.py --freeze-files"


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=lambda page: page.name)
def test_names_in_the_pages_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    folders = "|".join([*FOLDERS, "tests", "docs"])
    for path in re.findall(rf"`((?:{folders})/[\w./-]+)`", text):
        assert (ROOT / path).exists() or "NAME" in path, path
    for link in re.findall(r"\]\((?!https?:|#)([^)#]+)", text):
        assert (page.parent / link).exists(), link
    known = set(commands())
    for name in re.findall(r"\bforegate ([a-z]+)\b(?=[ `\n])", " ".join(re.findall(r"`[^`\n]+`", text))):
        assert name in known, f"foregate {name}"


def test_results_stand_between_markers() -> None:
    text = README.read_text(encoding="utf-8")
    assert text.count("<!-- results -->") == text.count("<!-- end of results -->") == 1


def texts(shared: Path | None, folder: Path) -> Path:
    """Give the folder that FOREGATE_DATA names: real SST-2 where it is at hand, else sentences of Python's own help."""
    if shared is not None and (shared / "data" / "sst2").is_dir():
        return shared / "data"
    sentences = re.findall(r"[A-Z][a-z][^.\n\t\"]{20,120}\.", " ".join(pydoc_data.topics.topics.values()))
    for name, count in (("train", 400), ("dev", 100)):
        rows = [f"{sentence}\t{index % 2}" for index, sentence in enumerate(sentences[:count])]
        (folder / "sst2").mkdir(parents=True, exist_ok=True)
        (folder / "sst2" / f"{name}.tsv").write_text("\n".join(["sentence\tlabel", *rows]) + "\n", encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Give the environment that a reader has after the installation, with small sizes."""
    shared = Path(os.environ.get("FOREGATE_SHARED", ROOT.parent / "shared"))
    data = texts(shared if shared.is_dir() else None, tmp_path_factory.mktemp("data"))
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    small = {"FOREGATE_SMOKE": "1", "OMP_NUM_THREADS": "1"}  # two threads gain nothing at these sizes
    return {**os.environ, **small, "PATH": path, "FOREGATE_DATA": str(data), "WANDB_MODE": "offline"}


@pytest.mark.skipif(shutil.which("bash") is None, reason="the README's commands are for bash")
def test_commands_and_python_run_in_order(environment: dict[str, str], tmp_path: Path, fork: Any) -> None:
    """Run all by bash, but for `foregate` with plain words: after the first of a page, these are forks."""
    ran = 0
    place: dict[str, Any] = {"env": environment, "cwd": tmp_path, "timeout": TIMEOUT_S}
    for page in PAGES:
        known = False  # that bash finds the program
        for command in shell_commands(page):
            if command.startswith("export ") or command in RUN_ELSEWHERE:
                continue  # where FOREGATE_DATA points is the fixture's business
            words = shlex.split(command)
            if known and words[0] == "foregate" and not re.search(r"[$|<>&;*`~]", command):
                done = fork.run("-m", "foregate.cli", *words[1:], **place)
            else:
                nothing = subprocess.DEVNULL
                done = subprocess.run(
                    ["bash", "-c", command], **place, stdin=nothing, capture_output=True, text=True, check=False
                )
                known = words[0] == "foregate"
            check(done, command)
            ran += 1
    assert ran >= 5
    for page in [*PAGES, *sorted((ROOT / "runtime" / "models").glob("*/README.md"))]:
        for block in blocks(page, "python"):
            check(fork.run("-c", block, **place), block)


def check(done: subprocess.CompletedProcess[str], shown: str) -> None:
    """Want success of what ran."""
    assert done.returncode == 0, f"{shown}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
