"""The program: every command's help and flags, and what a failure looks like from outside."""

from __future__ import annotations

import argparse
import errno
import importlib.metadata
import json
import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonargparse
import pytest
from foregate.cli import main as program
from foregate.collect.errors import ForegateError, SettingError, TraceError

SNAPSHOT = Path(__file__).with_name("cli_flags.json")
COMMANDS = sorted(program.commands())


def flags_of(parser: argparse.ArgumentParser) -> dict[str, Any]:
    """List a parser's arguments: options by their longest name, positionals, and the same for each sub-command."""
    options, positionals, nested = [], [], {}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            nested = {name: flags_of(choice) for name, choice in sorted(action.choices.items())}
        elif " --> " in action.dest or any(" --> " in item for item in action.option_strings):
            continue  # jsonargparse keeps links between arguments among them
        elif action.option_strings:
            options.append(max(action.option_strings, key=len))
        else:
            positionals.append(action.dest)
    found: dict[str, Any] = {"options": sorted(options), "positionals": positionals}
    return {**found, "commands": nested} if nested else found


def fake(monkeypatch: pytest.MonkeyPatch, run: Callable[[Any], int]) -> None:
    """Stand one command, `probe --size N --json`, in for all."""

    def parser() -> jsonargparse.ArgumentParser:
        made = jsonargparse.ArgumentParser(prog="foregate probe")
        made.add_argument("--size", type=int, default=1)
        made.add_argument("--json", action="store_true")
        return made

    monkeypatch.setattr(program, "commands", lambda: {"probe": "Probe."})
    monkeypatch.setattr(program, "command_module", lambda name: SimpleNamespace(parser=parser, run=run))


def one_line(capsys: pytest.CaptureFixture[str]) -> str:
    """Give the only line of standard error; standard output must be empty."""
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1, err
    assert "Traceback" not in err
    return err.rstrip("\n")


def test_flags_are_those_of_the_snapshot(request: pytest.FixtureRequest) -> None:
    flags = {name: flags_of(program.command_module(name).parser()) for name in COMMANDS}
    if request.config.getoption("--freeze-cli"):
        SNAPSHOT.write_text(json.dumps(flags, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    assert flags == json.loads(SNAPSHOT.read_text(encoding="utf-8")), (
        "on purpose? then pytest tests/test_cli.py --freeze-cli"
    )


@pytest.mark.parametrize("name", COMMANDS)
def test_help_names_the_command_and_explains_each_option(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert program.main([name, "--help"]) == 0
    out, _ = capsys.readouterr()
    assert re.match(rf"usage: foregate {name}\b", out)
    parser = program.command_module(name).parser()
    mute = [action.dest for action in parser._actions if not action.help and action.help is not argparse.SUPPRESS]
    assert not mute, f"without a help text: {mute}"


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_has_a_line_and_json(name: str) -> None:
    assert program.commands()[name].strip()
    flags = flags_of(program.command_module(name).parser())
    assert all("--json" in item["options"] for item in flags.get("commands", {"": flags}).values())


@pytest.mark.parametrize("name", COMMANDS)
def test_unknown_option_is_wrong_usage(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert program.main([name, "--no-such-option", "1"]) == 2
    assert one_line(capsys).startswith(f"foregate {name}: ")


def test_usage_lists_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert program.main(["--help"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert [line.split()[0] for line in out.split("commands:\n")[1].split("\n\n")[0].splitlines()] == COMMANDS
    assert program.main([]) == 2
    assert capsys.readouterr().out == ""


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert program.main(["--version"]) == 0
    assert capsys.readouterr().out == f"foregate {importlib.metadata.version('foregate')}\n"


def test_unknown_command_names_close_ones(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(program, "commands", lambda: {"generate": "", "train": ""})
    assert program.main(["generte"]) == 2
    assert one_line(capsys) == "foregate has no command 'generte'; did you mean generate?"
    assert program.main(["frobnicate"]) == 2
    assert "foregate --help" in one_line(capsys)


FAILURES = [
    (TraceError("a.npz is no trace; give a trace."), 1, "a.npz is no trace; give a trace."),
    (SettingError("size must be positive, got 0."), 2, "--size must be positive, got 0."),
    (SettingError("sizes must be positive, got 0."), 2, "sizes must be positive, got 0."),
    (ForegateError("two\n  lines."), 1, "two lines."),
    (OSError(errno.ENOSPC, "No space left on device", "out/x"), 1, "no space left on the device: out/x; free some"),
    (OSError(errno.ENOSPC, "", "/tmp/part", None, "out/x"), 1, "no space left on the device: out/x; free some"),
    (OSError(errno.EACCES, "Permission denied", "out/x"), 1, "no permission: out/x; change"),
    (FileNotFoundError(errno.ENOENT, "No such file", "in/x"), 1, "no such file or folder: in/x; check the path."),
    (OSError("model is\nnot there"), 1, "model is not there"),
    (MemoryError(), 1, "not enough memory"),
    (RuntimeError("odd\nthing"), 1, "unexpected RuntimeError: odd thing; --debug shows the traceback."),
    (KeyboardInterrupt(), 130, "interrupted."),
]


@pytest.mark.parametrize(("error", "code", "text"), FAILURES, ids=lambda value: type(value).__name__)
def test_failures_are_one_sentence(
    error: BaseException,
    code: int,
    text: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def run(args: Any) -> int:
        raise error

    fake(monkeypatch, run)
    assert program.main(["probe"]) == code
    assert one_line(capsys).startswith(f"foregate probe: {text}")


def test_debug_shows_the_traceback_wherever_it_stands(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(args: Any) -> int:
        raise TraceError("bad.")

    fake(monkeypatch, run)
    for words in (["--debug", "probe"], ["probe", "--debug", "--size", "2"], ["probe", "--size", "2", "--debug"]):
        assert program.main(words) == 1
        out, err = capsys.readouterr()
        assert out == ""
        assert "Traceback" in err
        assert err.endswith("foregate probe: bad.\n")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--size", "many"], "--size must be a whole number, got 'many'."),
        (["--sizes", "1"], "there is no option --sizes; did you mean --size?"),
        (["extra"], "'extra' stands without an option; give it to one, or leave it out."),
    ],
)
def test_bad_arguments_are_one_line(
    words: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake(monkeypatch, lambda args: 0)
    assert program.main(["probe", *words]) == 2
    assert one_line(capsys) == f"foregate probe: {said}"


def test_exit_code_of_a_failed_check_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    fake(monkeypatch, lambda args: args.size)
    assert program.main(["probe", "--size", "1"]) == 1
    assert program.main(["probe", "--size", "0"]) == 0


def test_log_lines_go_to_standard_error_and_the_logger_is_left_as_it_was(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    logger = logging.getLogger("foregate")
    before = (list(logger.handlers), logger.level, list(logging.getLogger().handlers))

    def run(args: Any) -> int:
        logging.getLogger("foregate.runtime.probe").info("read 3 blocks")
        print(json.dumps({"ok": True}))
        return 0

    fake(monkeypatch, run)
    assert program.main(["probe", "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out) == {"ok": True}
    assert err == "foregate.runtime.probe: read 3 blocks\n"
    assert (list(logger.handlers), logger.level, list(logging.getLogger().handlers)) == before


SUBPROCESS = """
import signal, sys, threading
from types import SimpleNamespace
import jsonargparse
from foregate.cli import main as program

def run(args):
    {body}

program.commands = lambda: {{"probe": "Probe."}}
parser = lambda: jsonargparse.ArgumentParser(prog="foregate probe")
program.command_module = lambda name: SimpleNamespace(parser=parser, run=run)
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests were started with nohup or `&`
sys.exit(program.main(["probe"]))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX pipes and signals")
def test_a_reader_that_went_away_is_no_error() -> None:
    code = SUBPROCESS.format(body="print('x' * 100_000, flush=True); return 0")
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as out:
        done = subprocess.run([sys.executable, "-c", code], stdout=out, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (program.BROKEN_PIPE, "")


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX pipes and signals")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_lets_the_command_clean_up(number: int, code: int, tmp_path: Path) -> None:
    left = tmp_path / "left"
    body = f"""
    try:
        print("ready", flush=True)
        threading.Event().wait(30)
    finally:
        open({str(left)!r}, "w").close()
"""
    with subprocess.Popen(
        [sys.executable, "-c", SUBPROCESS.format(body=body.strip())],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        assert process.wait(30) == code
    assert left.exists()
