"""Recording with several processes: each has its own batches and shards, and together they give one process's rows."""

from __future__ import annotations

import json
import os
import socket
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from foregate.collect import tiny_models
from foregate.collect.checks import check_trace
from foregate.collect.collection import CollectConfig, collect
from foregate.collect.errors import ForegateError, SettingError
from foregate.collect.ranks import Ranks
from foregate.collect.trace import Trace

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="gloo by torchrun, and POSIX signals")

PATIENCE_S = 240  # for a busy machine; a run takes ten seconds
ALONE = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
ENVIRONMENT = {**ALONE, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}

# `foregate ARGUMENTS` in which rank 1 ends in the way that FAIL says, when it writes its second shard
PROGRAM = """
import errno, os, signal, sys
import pyarrow.parquet as pq
from foregate.cli.main import main

whole, calls = pq.write_table, []

def write_table(*args, **options):
    calls.append(1)
    if os.environ["RANK"] == "1" and len(calls) == 2:
        if os.environ["FAIL"] == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if os.environ["FAIL"] == "full disk":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return whole(*args, **options)

pq.write_table = write_table
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> CollectConfig:
    """Give settings over a tiny model and 90 texts, which make two windows of batches."""
    folder = tmp_path_factory.mktemp("ranks")
    tiny_models.build("qwen3_moe").save_pretrained(folder / "model")
    tiny_models.tokenizer().save_pretrained(folder / "model")
    texts = [f"{'word ' * (number % 7)}number {number}." for number in range(90)]
    (folder / "texts.txt").write_text("\n\n".join(texts), encoding="utf-8")
    (folder / "program.py").write_text(PROGRAM, encoding="utf-8")
    return CollectConfig(
        model=str(folder / "model"),
        data=str(folder / "texts.txt"),
        out=str(folder / "alone"),
        batch_size=4,
        shard_rows=5,
        device="cpu",
    )


def words(config: CollectConfig, *more: str) -> list[str]:
    """Give the program and its arguments."""
    flags = ("model", "data", "out", "batch_size", "shard_rows", "device")
    given = [f"--{name}={getattr(config, name)}" for name in flags]
    return [str(Path(config.model).parent / "program.py"), "collect", *given, "--json", *more]


def contents(path: str) -> dict[tuple[str, str, int], tuple]:
    rows = list(Trace.open(path))
    found = {
        (row.sequence, row.stack, row.part): (row.token_ids.tolist(), row.experts.tolist(), row.weights.tolist())
        for row in rows
    }
    assert len(found) == len(rows)
    return found


def test_a_failed_rank_fails_the_run_and_resuming_gives_the_rows_of_one_process(config, tmp_path, fork) -> None:
    both = replace(config, out=str(tmp_path / "both"))
    failed = fork.run(*words(both), env={**ENVIRONMENT, "FAIL": "full disk"}, ranks=2, timeout=PATIENCE_S)
    assert failed.returncode != 0
    assert "no space left on the device" in failed.stderr
    assert failed.stdout == ""
    assert list(check_trace(both.out)) == []
    kept = len(contents(both.out))
    done = fork.run(*words(both, "--resume"), env={**ENVIRONMENT, "FAIL": "never"}, ranks=2, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    value = json.loads(done.stdout)  # rank 0 alone speaks, for both
    assert (value["sequences"], value["new_sequences"]) == (90, 90 - kept)
    names = [path.name for path in Path(both.out).iterdir()]
    assert {name[:11] for name in names} == {"shard-00000", "shard-00001", "trace.json"}
    result = collect(config)
    assert (result.sequences, result.tokens) == (90, value["tokens"])
    assert contents(both.out) == contents(config.out)
    assert list(check_trace(both.out)) == []


def test_a_killed_rank_ends_the_others(config, tmp_path, fork) -> None:
    """Nobody watches these two processes as torchrun would; the survivor notices by itself."""
    both = replace(config, out=str(tmp_path / "both"))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    meeting = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "FAIL": "killed"}
    children = [
        fork.start(*words(both), env={**ENVIRONMENT, **meeting, "RANK": rank, "LOCAL_RANK": rank}) for rank in "01"
    ]
    done = [child.finish(PATIENCE_S) for child in children]
    assert [process.returncode for process in done] == [1, -9]
    assert "Another of the 2 processes has ended before its time" in done[0].stderr.splitlines()[-1]
    assert list(check_trace(both.out)) == []
    assert collect(replace(both, resume=True)).sequences == 90  # one process goes on where two stopped
    assert not list(Path(both.out).glob(".*"))


def test_a_process_alone_talks_to_nobody(monkeypatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    with Ranks.from_environment() as ranks:
        assert (ranks.rank, ranks.size, ranks.gather([3, 4])) == (0, 1, [[3, 4]])
        ranks.barrier()


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"RANK": "one", "WORLD_SIZE": "2"}, "RANK must be a number, got 'one'"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, r"RANK must lie in 0\.\.1 \(WORLD_SIZE\) .* got 2"),
        ({"RANK": "0", "WORLD_SIZE": ""}, "WORLD_SIZE must be a number, got ''"),
    ],
)
def test_an_environment_that_makes_no_sense_is_refused(monkeypatch, values, reason) -> None:
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SettingError, match=reason):
        Ranks.from_environment()


def test_processes_that_cannot_meet_are_told_so(monkeypatch) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.delenv("MASTER_PORT", raising=False)
    with pytest.raises(ForegateError, match=r"did not meet the other 1 processes .* start all of them with torchrun"):
        Ranks(1, 2).__enter__()
