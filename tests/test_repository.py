"""Habits that hold for every file: short, documented, ASCII, and free of what does not belong in a product."""

from __future__ import annotations

import ast
import functools
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ["collect", "predictors", "runtime", "train", "cli", "configs"]
MODULES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
SUFFIXES = (".py", ".md", ".toml", ".yaml", ".yml", ".txt")
TEXTS = sorted(
    [path for path in ROOT.iterdir() if path.suffix in SUFFIXES or path.name in ("Makefile", ".gitignore")]
    + [path for path in (ROOT / ".ci").iterdir()]
    + [
        path
        for folder in [*FOLDERS, "tests", "docs"]
        for path in (ROOT / folder).rglob("*")
        if path.suffix in SUFFIXES and "models" not in path.parts  # a tokenizer's merges are no text of ours
    ]
)
MOST_LINES = 300
MOST_BYTES = 20 * 2**20  # the largest packaged model

FORBIDDEN = {  # each pattern is written so that it does not match itself
    "work left for later": r"\bTO[D]O\b|\bFIXM[E]\b|\bXX[X]\b",
    "a fixed device": r"cuda[:]\d",
    "a path of one machine": r"/(?:[w]ork|[f]arm|[r]oot|[h]ome|[s]cratch|[U]sers)/",
    "how the text came about": r"sub[a]gent|\bteam[m]ate|\b[C]laude\b|\b[A]nthropic|\bprompted b[y]\b|[i]ssue #?\d",
}


def relative(path: Path) -> str:
    """Give a path as a test id."""
    return str(path.relative_to(ROOT))


@functools.cache
def tree_of(path: Path) -> ast.Module:
    """Parse a file."""
    return ast.parse(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_files_are_short(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= MOST_LINES


@pytest.mark.parametrize("path", TEXTS, ids=relative)
def test_texts_are_ascii_and_belong_here(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    odd = sorted({character for character in text if not character.isascii()})
    assert not odd or path.is_relative_to(ROOT / "tests"), f"not ASCII: {odd}"  # tests may hold other people's texts
    for what, pattern in FORBIDDEN.items():
        found = re.search(pattern, text)
        assert not found, f"{what}: {text[: found.start()].count(chr(10)) + 1}: {found[0]!r}"


def test_no_file_is_too_large() -> None:
    files = [path for folder in [*FOLDERS, "tests"] for path in (ROOT / folder).rglob("*") if path.is_file()]
    assert not [relative(path) for path in files if path.stat().st_size > MOST_BYTES]


def undocumented(body: list[ast.stmt], prefix: str = "") -> Iterator[str]:
    """Give the public functions, classes and methods without a docstring."""
    for node in body:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) or node.name.startswith("_"):
            continue
        given_elsewhere = any(ast.unparse(mark) in ("override", "overload") for mark in node.decorator_list)
        setter = any(ast.unparse(mark).endswith(".setter") for mark in node.decorator_list)
        if ast.get_docstring(node) is None and not given_elsewhere and not setter:
            yield f"{prefix}{node.name} (line {node.lineno})"
        if isinstance(node, ast.ClassDef):
            yield from undocumented(node.body, f"{prefix}{node.name}.")


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_public_names_are_documented(path: Path) -> None:
    tree = tree_of(path)
    assert ast.get_docstring(tree), "no module docstring"
    assert not list(undocumented(tree.body))


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_nothing_is_unpickled_or_swallowed(path: Path) -> None:
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
            assert not {"pickle", "cPickle", "dill", "cloudpickle", "joblib"} & set(names), f"line {node.lineno}"
        if isinstance(node, ast.Call):
            given = {item.arg: ast.unparse(item.value) for item in node.keywords}
            if ast.unparse(node.func) == "torch.load":
                assert given.get("weights_only") == "True", f"line {node.lineno}: torch.load without weights_only=True"
            assert given.get("allow_pickle", "False") == "False", f"line {node.lineno}"
            assert given.get("trust_remote_code") != "True", f"line {node.lineno}: only a user may ask for remote code"
        if isinstance(node, ast.ExceptHandler):
            assert node.type is not None, f"line {node.lineno}: bare except"
            broad = ast.unparse(node.type) in ("Exception", "BaseException")
            silent = all(isinstance(item, ast.Pass | ast.Continue) for item in node.body)
            assert not (broad and silent), f"line {node.lineno}: an error is swallowed"


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_no_absolute_path_is_written_down(path: Path) -> None:
    tops = "home|root|tmp|scratch|Users|mnt|media|opt|srv|usr|var|etc"
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            assert not re.match(rf"/(?:{tops})(?:/|$)|[A-Z]:\\", node.value), f"line {node.lineno}: {node.value!r}"


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_settings_are_frozen_and_documented(path: Path) -> None:
    for node in tree_of(path).body:
        if not (isinstance(node, ast.ClassDef) and node.name.endswith(("Config", "Settings"))):
            continue
        mark = next((ast.unparse(item) for item in node.decorator_list if "dataclass" in ast.unparse(item)), "")
        assert not mark or ("frozen=True" in mark and "kw_only=True" in mark), f"{node.name}: {mark}"
        if not mark:
            continue
        for field, after in zip(node.body, [*node.body[1:], None], strict=True):
            if isinstance(field, ast.AnnAssign) and not ast.unparse(field.annotation).startswith("ClassVar"):
                told = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
                assert told, f"{node.name}.{ast.unparse(field.target)} has no docstring under it"


WITH_ALL = [path for path in MODULES if "__all__" in path.read_text(encoding="utf-8")]


@pytest.mark.parametrize("path", WITH_ALL, ids=relative)
def test_all_is_sorted_and_true(path: Path) -> None:
    parts = path.relative_to(ROOT).with_suffix("").parts
    module = importlib.import_module(".".join(["foregate", *(part for part in parts if part != "__init__")]))
    assert list(module.__all__) == sorted(module.__all__)
    assert not [name for name in module.__all__ if not hasattr(module, name)]
