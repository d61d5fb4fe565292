"""Wrong usage: every option of every sub-command, and every key of a settings file, is refused in the user's words."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from foregate.cli import main as program
from foregate.cli.wrong_usage import _commands

JARGON = re.compile(
    r"Parser key|Union|subtypes|Expected a|<class|typing\.|NoneType|NestedArg|class_path|argument:|\.\.$"
)
Refusal = Callable[..., str]


COMMANDS = program.commands()
MODULES = {name: program.command_module(name) for name in COMMANDS}
BUILT = {name: module.parser() for name, module in MODULES.items()}  # each is built once, which takes the time


def parsers() -> dict[str, Any]:
    """Give the parser of each sub-command, those of foregate bench too."""
    found = {}
    for name, parser in BUILT.items():
        below = {f"{name} {item}": child for item, child in _commands(parser).items()}
        found.update(below or {name: parser})
    return found


PARSERS = parsers()
OPTIONS = [
    (name, action)
    for name, parser in PARSERS.items()
    for action in parser._actions
    if action.option_strings and " --> " not in action.option_strings[0]
    if not action.dest.endswith(("help", "print_config"))
]
CHECKED = [item for item in OPTIONS if str(getattr(item[1], "_typehint", None)) not in ("None", "<class 'str'>")]
CHECKED = [item for item in CHECKED if not re.search(r"\bstr\b|Path'", str(item[1]._typehint))]
REQUIRED = [(name, parser) for name, parser in PARSERS.items() if any(item.required for item in parser._actions)]


def words_of(parser: Any, *, without: str = "") -> list[str]:
    """Give values for all that is required."""
    words = []
    for action in parser._actions:
        if action.required and action.dest != without and " --> " not in action.dest:
            words += [*action.option_strings[:1], "1"]
    return words


@pytest.fixture
def refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Refusal:
    """Run a command that must be refused as wrong usage; give what it says after its name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(program, "commands", lambda: COMMANDS)
    for name, module in MODULES.items():
        monkeypatch.setattr(module, "parser", lambda name=name: BUILT[name])

    def run(*words: str, code: int = 2) -> str:
        assert program.main(list(words)) == code
        out, err = capsys.readouterr()
        assert out == ""
        assert err.count("\n") == 1, err
        assert err.startswith(f"foregate {words[0]}: ")
        assert not JARGON.search(err.strip()), err
        assert err.rstrip().endswith((".", "?"))
        return err.strip().removeprefix(f"foregate {words[0]}: ")

    return run


@pytest.mark.parametrize(("name", "action"), CHECKED, ids=lambda value: getattr(value, "dest", value))
def test_a_value_of_another_type_is_named_by_its_option(name: str, action: Any, refusal: Refusal) -> None:
    said = refusal(*name.split(), *words_of(PARSERS[name], without=action.dest), action.option_strings[0], "no-such")
    assert said.startswith(f"{action.option_strings[0]} must be ")
    assert "got 'no-such'" in said


@pytest.mark.parametrize(("name", "action"), OPTIONS, ids=lambda value: getattr(value, "dest", value))
def test_a_misspelt_option_is_told_the_one_that_was_meant(name: str, action: Any, refusal: Refusal) -> None:
    flag = action.option_strings[0]
    wrong = f"{flag[:-1]}{flag[-1] * 2}q"
    assert refusal(*name.split(), wrong, "1") == f"there is no option {wrong}; did you mean {flag}?"


@pytest.mark.parametrize(("name", "action"), OPTIONS, ids=lambda value: getattr(value, "dest", value))
def test_a_value_that_is_missing_or_too_many(name: str, action: Any, refusal: Refusal) -> None:
    flag = action.option_strings[0]
    if action.nargs == "?":
        pytest.skip("true by itself")
    if action.nargs == 0:
        assert refusal(*name.split(), f"{flag}=3") == f"{flag} takes no value, got '3'; give {flag} alone."
    else:
        said = refusal(*name.split(), *words_of(PARSERS[name], without=action.dest), flag)
        assert said.startswith(f"{flag} needs a value and got none; give {flag} ")


@pytest.mark.parametrize(("name", "parser"), REQUIRED, ids=lambda value: value if isinstance(value, str) else "")
def test_what_is_missing_is_named_as_it_is_typed(name: str, parser: Any, refusal: Refusal) -> None:
    required = [item for item in parser._actions if item.required and " --> " not in item.dest]
    said = refusal(*name.split())
    for action in required:
        assert re.search(rf"(^|[ ,]){re.escape((action.option_strings or [action.dest])[0])}\b", said)
        if action.option_strings:
            only = refusal(*name.split(), *words_of(parser, without=action.dest))
            assert only.startswith(f"{action.option_strings[0]} is missing; usage: foregate {name} ")


CASES = {
    "a whole number": (["collect", "--max-tokens", "1.5"], "--max-tokens must be a whole number, got '1.5'."),
    "nothing": (["collect", "--max-tokens", "null"], "--max-tokens must be a whole number, got nothing."),
    "below": (["train", "--model.network.hidden", "a"], "--model.network.hidden must be a whole number, got 'a'."),
    "below, joined": (["train", "--model.network.hidden=a"], "--model.network.hidden must be a whole number, got 'a'."),
    "below, nothing": (["train", "--model.network.hidden", "null"], "hidden must be a whole number, got nothing."),
    "a list": (
        ["import", "--blocks", "[1,a]"],
        "--blocks must be a list of whole numbers such as [0, 1], got [1, 'a'].",
    ),
    "a list below": (["train", "--model.network.decays", "[0.1,a]"], "a list of numbers such as [0.5, 0.9], got [0.1,"),
    "a close name": (
        ["simulate", "--as", "decod"],
        "one of decode, prefill, recorded, got 'decod'; did you mean 'decode'?",
    ),
    "what follows from another": (
        ["train", "--data.trace", "t"],
        "--data.trace follows from --trace; give that alone.",
    ),
    "unknown below": (["train", "--model.network.hiden", "3"], "has no setting 'hiden'; did you mean 'hidden'?"),
    "unknown and far": (["train", "--data.split.foo", "3"], "legal are test_share, validation_share, order, seed, by."),
    "a class": (["train", "--model.network", "SruAttentionSetings"], "did you mean 'SruAttentionSettings'?"),
    "a class to explain": (["train", "--model.network.help", "a"], "--model.network.help must be the name of a class"),
    "a group": (["train", "--fit", "a"], "--fit must be a YAML file with its settings, got 'a'; one by one they are"),
    "one word too many": (
        ["simulate", "a"],
        "'a' is one argument too many; foregate simulate takes trace and options.",
    ),
    "a word of an option": (["collect", "a"], "give it to one, such as --model a, or leave it out."),
    "a config": (["collect", "--config", "sst"], "--config must be the path of a YAML file or one of"),
    "a close config": (["train", "--config", "sru_atention"], "got 'sru_atention'; did you mean 'sru_attention'?"),
    "a policy": (["simulate", "--policies", "lur"], "got 'lur'; did you mean 'lru'?"),
    "the forecast's policy": (["simulate", "--policies", "predicted"], "simulate --predictor BUNDLE makes them."),
    "a machine": (["simulate", "--hardware", "h20"], "got 'h20'; did you mean 'h200'?"),
    "a family": (["families", "--only", "mixtrl"], "got 'mixtrl'; did you mean 'mixtral'?"),
    "out of range": (["collect", "--max-tokens", "0"], "--max-tokens must be at least 1, got 0."),
    "out of range, dotted": (["train", "--fit.max_minutes", "0"], "--fit.max_minutes must be positive, got 0.0."),
}


@pytest.mark.parametrize(("words", "said"), CASES.values(), ids=CASES)
def test_what_is_said(words: list[str], said: str, refusal: Refusal) -> None:
    given = words_of(PARSERS[words[0]])
    assert said in refusal(words[0], *given, *words[1:])


def test_a_benchmark_and_a_command(refusal: Refusal, capsys: pytest.CaptureFixture[str]) -> None:
    assert refusal("bench", "hardwar").endswith("got 'hardwar'; did you mean 'hardware'?")
    assert refusal("bench") == (
        "NAME is missing; usage: foregate bench NAME [options], with one of epoch, hardware, predictors, record, "
        "replay, simulate."
    )
    assert program.main(["simulat"]) == 2
    assert capsys.readouterr().err == "foregate has no command 'simulat'; did you mean simulate?\n"


FILES = {
    "max_tokns: 3": "own.yaml has an unknown key 'max_tokns'; did you mean 'max_tokens'?",
    "max-tokens: 3": "own.yaml has an unknown key 'max-tokens'; did you mean 'max_tokens'?",
    "qqq: 3": "own.yaml has an unknown key 'qqq'; legal are model, data, out",
    "max_tokens: abc": "own.yaml: max_tokens must be a whole number, got 'abc'.",
    "max_tokens: 1.5": "own.yaml: max_tokens must be a whole number, got '1.5'.",
    "max_tokens: null": "own.yaml: max_tokens must be a whole number, got nothing.",
    "overflow: spli": "own.yaml: overflow must be one of split, cut, got 'spli'; did you mean 'split'?",
    "- a": "own.yaml must hold settings, a line such as model: VALUE each, got \"['a']\".",
    "": "own.yaml must hold settings, a line such as model: VALUE each, got nothing.",
    "a: [": "own.yaml is no readable YAML file (",
    "max_tokens: 0": "--max-tokens must be at least 1, got 0.",
}
TRAIN_FILES = {
    "fit:\n  max_minuts: 3": "own.yaml has an unknown key 'fit.max_minuts'; did you mean 'fit.max_minutes'?",
    "fit: 3": "own.yaml: fit must hold settings of its own, such as max_minutes, got 3.",
    "fit:\n  patience: a": "own.yaml: fit.patience must be a whole number, got 'a'.",
    "modell:\n  a: 3": "own.yaml has an unknown key 'modell'; did you mean 'model'?",
    "model:\n  network:\n    init_args:\n      hiden: 3": "own.yaml: model.network has no setting 'hiden'; did",
    "model:\n  network:\n    init_args:\n      hidden: a": "own.yaml: model.network.init_args.hidden must be a whole",
}


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [("collect", *item) for item in FILES.items()] + [("train", *item) for item in TRAIN_FILES.items()],
)
def test_a_settings_file_is_refused_by_file_and_key(name: str, text: str, said: str, refusal: Refusal) -> None:
    Path("own.yaml").write_text(f"{text}\n", encoding="utf-8")
    assert refusal(name, *words_of(PARSERS[name]), "--config", "own.yaml").startswith(said)


def test_keys_that_are_legal_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own.yaml").write_text("fit:\n  max_minutes: 2\n  patience: 3\nresume: true\njson: true\n", encoding="utf-8")
    args = PARSERS["train"].parse_args(["--trace", "t", "--out", "o", "--config", "own.yaml"])
    assert (args.fit.patience, args.fit.max_minutes, args.resume) == (3, 2.0, True)
