"""The program `foregate`: finds a sub-command, runs it, and turns its errors into one sentence and an exit code.

A sub-command is a file of this folder with `parser()` and `run(args) -> int`; only the file that was asked for is
imported. Exit codes: 0 success, 1 a check or a run failed, 2 wrong usage, 130 interrupted. Names no sub-command.
"""

from __future__ import annotations

import ast
import contextlib
import errno
import importlib
import importlib.metadata
import io
import logging
import os
import signal
import sys
import threading
import traceback
import warnings
from argparse import ArgumentError
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType

from ..collect.errors import ForegateError, SettingError
from ..collect.wording import ending

FOLDER = Path(__file__).parent
LISTS_COMMANDS = "; foregate --help lists the commands."
BROKEN_PIPE, INTERRUPTED, TERMINATED = 141, 130, 143  # 128 + signal number, as a shell reports them

# What a user reads instead of the operating system's own words; {file} is " PATH" or empty.
OS_ERRORS = {
    errno.ENOSPC: "no space left on the device{file}; free some or name another folder.",
    errno.EDQUOT: "the disk quota is used up{file}; free some space or name another folder.",
    errno.EFBIG: "the file would become larger than is allowed{file}; raise the limit with ulimit -f.",
    errno.EACCES: "no permission{file}; change its permissions or name another path.",
    errno.EPERM: "not permitted{file}; change its permissions or name another path.",
    errno.EROFS: "the file system is read-only{file}; name another folder.",
    errno.ENOENT: "no such file or folder{file}; check the path.",
    errno.EEXIST: "a file stands there already{file}; remove it or name another path.",
    errno.ENOTDIR: "not a folder{file}; check the path.",
    errno.EISDIR: "a folder stands where a file was expected{file}; check the path.",
    errno.EMFILE: "too many open files{file}; raise the limit with ulimit -n.",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program with the given arguments, those of the process by default, and give its exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # generated text must not fail on a narrow terminal encoding
    words = list(sys.argv[1:] if argv is None else argv)
    debug, words = _take_debug(words)
    if not words:
        print(usage(), file=sys.stderr)
        return 2
    name, rest = words[0], words[1:]
    if name in ("-h", "--help", "help"):
        print(usage())
        return 0
    if name == "--version":
        print(f"foregate {version()}")
        return 0
    if name not in commands():
        print(_unknown(name), file=sys.stderr)
        return 2
    return run_command(name, rest, debug=debug)


def commands() -> dict[str, str]:
    """Map each sub-command to the first line of its docstring, read without importing any."""
    found = {}
    for path in sorted(FOLDER.glob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        if {"parser", "run"} <= functions:
            found[path.stem] = (ast.get_docstring(tree) or "").partition("\n")[0]
    return found


def command_module(name: str) -> ModuleType:
    """Import one sub-command's file."""
    return importlib.import_module(f"{__package__}.{name}")


def version() -> str:
    """Give the installed version of foregate."""
    return importlib.metadata.version("foregate")


def usage() -> str:
    """Give the text of `foregate --help`."""
    found = commands()
    width = max(map(len, found), default=0)
    lines = [f"  {name:<{width}}  {line}" for name, line in found.items()]
    return "\n".join(
        [
            "usage: foregate COMMAND [ARGUMENTS]",
            "",
            "commands:",
            *lines,
            "",
            "foregate COMMAND --help lists a command's arguments, --debug shows tracebacks, --version the version.",
        ]
    )


def run_command(name: str, argv: Sequence[str], *, debug: bool = False) -> int:
    """Run one sub-command and give its exit code; every failure becomes one line on standard error."""
    try:
        with _logging_to_stderr(debug), _quiet_warnings(debug), _termination_as_exit():
            code = _parse_and_run(name, argv)
            sys.stdout.flush()  # a reader that went away is noticed here, not at exit
            return code
    except SystemExit as error:  # --help, and termination by a signal
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    except KeyboardInterrupt:
        return _fail(name, "interrupted.", INTERRUPTED)
    except BrokenPipeError:
        _discard_stdout()
        return BROKEN_PIPE
    except Exception as error:
        if debug:
            traceback.print_exc()
        code = 2 if isinstance(error, SettingError) else 1
        return _fail(name, sentence(error), code)


def sentence(error: Exception) -> str:
    """Say what went wrong in one line."""
    if isinstance(error, ForegateError):
        return _one_line(str(error))
    if isinstance(error, OSError) and error.errno in OS_ERRORS:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        name = error.filename2 if full and error.filename2 is not None else error.filename  # of a copy, where it went
        file = f": {name}" if name is not None else ""
        return OS_ERRORS[error.errno].format(file=file)
    if isinstance(error, MemoryError):
        return "not enough memory; choose a smaller budget, batch or model."
    text = _one_line(str(error)) or "no message"
    if isinstance(error, OSError):
        return text
    return f"unexpected {type(error).__name__}: {text.rstrip('.')}; --debug shows the traceback."


def _parse_and_run(name: str, argv: Sequence[str]) -> int:
    from .config_file import check_nothing  # only a command that runs needs these
    from .wrong_usage import explain, named_as_typed

    module = command_module(name)
    parser = module.parser()
    parser.exit_on_error = False  # an ArgumentError instead of a usage dump
    try:
        args = parser.parse_args(list(argv))
    except ArgumentError as error:
        raise SettingError(explain(parser, error, argv)) from error
    check_nothing(parser, args)
    try:
        return module.run(args)
    except SettingError as error:
        raise SettingError(named_as_typed(parser, str(error), argv)) from error


def _take_debug(words: list[str]) -> tuple[bool, list[str]]:
    """Take --debug out of the words before a lone `--`, wherever it stands."""
    end = words.index("--") if "--" in words else len(words)
    kept = [word for word in words[:end] if word != "--debug"]
    return len(kept) < end, kept + words[end:]


def _unknown(name: str) -> str:
    return f"foregate has no command {name!r}{ending(name, commands(), otherwise=LISTS_COMMANDS, show=str)}"


def _fail(name: str, text: str, code: int) -> int:
    with contextlib.suppress(BrokenPipeError):
        print(f"foregate {name}: {text}", file=sys.stderr)
    return code


def _one_line(text: str) -> str:
    return " ".join(text.split())


@contextlib.contextmanager
def _logging_to_stderr(debug: bool) -> Iterator[None]:
    """Send foregate's own log lines to standard error while a command runs; the root logger stays as it is."""
    logger = logging.getLogger("foregate")
    level, handler = logger.level, logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG if debug else logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


@contextlib.contextmanager
def _quiet_warnings(debug: bool) -> Iterator[None]:
    """Keep other packages' warnings away from a user who can do nothing about them."""
    with warnings.catch_warnings():
        if not debug:
            warnings.simplefilter("ignore")
        yield


@contextlib.contextmanager
def _termination_as_exit() -> Iterator[None]:
    """Let SIGTERM unwind like an exit, so that temporary stores are removed."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(signum: int, frame: object) -> None:
        raise SystemExit(TERMINATED)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _discard_stdout() -> None:
    """Point standard output at nothing, so that Python's flush at exit does not complain about the closed pipe."""
    with contextlib.suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)


if __name__ == "__main__":
    raise SystemExit(main())
