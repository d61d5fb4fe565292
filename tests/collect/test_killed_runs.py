"""Runs that are killed, meet a full disk or a second writer: what is there stays valid, and resuming completes it."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from foregate.collect import tiny_models
from foregate.collect.checks import check_trace
from foregate.collect.collection import CollectConfig, collect
from foregate.collect.errors import TraceError
from foregate.collect.lock import WriterLock, abandoned, others_write
from foregate.collect.sequence import SequenceRouting
from foregate.collect.topology import MoeTopology
from foregate.collect.trace import Trace, TraceHeader
from foregate.collect.writer import TraceWriter, WriterConfig

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals and limits")

SEQUENCES, SHARD_ROWS = 40, 8

# A run of the writer alone, which kills itself with SIGKILL at the n-th call of something: argv is PATH POINT N.
WRITING = """
import os, signal, sys
import numpy as np
import pyarrow.parquet as pq
from foregate.collect.sequence import SequenceRouting
from foregate.collect.topology import MoeTopology
from foregate.collect.trace import TraceHeader
from foregate.collect.writer import TraceWriter, WriterConfig

path, point, left = sys.argv[1], sys.argv[2], int(sys.argv[3])

def die_at(owner, name, when):
    whole = getattr(owner, name)
    def call(*args, **kwargs):
        global left
        left -= point == when
        if point == when and not left and when.startswith("before"):
            os.kill(os.getpid(), signal.SIGKILL)
        if point == when and not left and when == "within write":
            args[1].write(b"PAR1 and half of a shard")
            args[1].flush()
            os.kill(os.getpid(), signal.SIGKILL)
        result = whole(*args, **kwargs)
        if point == when and not left and when.startswith("after"):
            os.kill(os.getpid(), signal.SIGKILL)
        return result
    setattr(owner, name, call)

die_at(os, "fsync", "before fsync")
die_at(os, "replace", "before rename")
die_at(os, "replace", "after rename")
die_at(pq, "write_table", "within write")
header = TraceHeader(topology=MoeTopology.uniform(2, 8, 2), scores="selection")
with TraceWriter(path, header, resume=True, config=WriterConfig(shard_rows=8, queue_rows=3)) as writer:
    for number in range(40):
        if not writer.finished(str(number)):
            scores = np.random.default_rng(number).random((4, 2, 8)).astype(np.float32)
            experts = np.argsort(-scores)[..., :2].reshape(4, 4)
            writer.write(SequenceRouting(sequence=str(number), experts=experts, scores=scores.reshape(4, 16)))
"""


@pytest.fixture(scope="module")
def write(fork) -> Callable[..., int]:
    """Run the writer in a process of its own; give its exit code, negative for a signal."""

    def run(path: Path, point: str = "never", number: int = 0) -> int:
        return fork.run("-c", WRITING, str(path), point, str(number), timeout=120).returncode

    return run


def contents(path: Path) -> dict[str, tuple]:
    """Give the rows by sequence; each sequence stands there once."""
    found = {}
    for row in Trace.open(path):
        assert row.sequence not in found
        arrays = (row.experts, row.token_ids, row.weights, row.scores)
        values = tuple(None if array is None else array.tolist() for array in arrays)
        found[row.sequence] = (row.stack, row.part, row.group, row.category, row.source, row.prompt_tokens, *values)
    return found


def leftovers(path: Path) -> list[str]:
    return sorted(item.name for item in path.iterdir() if item.name.startswith("."))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, write) -> dict[str, tuple]:
    """Give the rows of a run that nothing disturbed."""
    path = tmp_path_factory.mktemp("undisturbed") / "t"
    assert write(path) == 0
    assert leftovers(path) == []
    assert len(contents(path)) == SEQUENCES
    return contents(path)


# calls of fsync and rename: the first is the header's, then one for each shard
@pytest.mark.parametrize(
    ("point", "numbers"),
    [
        ("before fsync", (1, 2, 3)),
        ("before rename", (1, 2, 4)),
        ("after rename", (1, 2, 3)),
        ("within write", (1, 2, 1)),
    ],
)
def test_a_killed_writer_loses_at_most_its_open_shard(tmp_path, undisturbed, write, point, numbers) -> None:
    path, kept = tmp_path / "t", 0
    for number in numbers:
        assert write(path, point, number) == -signal.SIGKILL
        if (path / "trace.json").exists():
            assert [problem.reason for problem in check_trace(path)] in ([], ["it holds no rows"])
            there = contents(path)
            assert len(there) >= kept  # nothing that was there is lost
            assert there == {name: undisturbed[name] for name in list(undisturbed)[: len(there)]}
            kept = len(there)
    assert kept >= SHARD_ROWS
    assert write(path) == 0
    assert contents(path) == undisturbed
    assert [row.sequence for row in Trace.open(path)] == list(undisturbed)
    assert list(check_trace(path)) == []
    assert leftovers(path) == []


@pytest.fixture(scope="module")
def recipe(tmp_path_factory) -> CollectConfig:
    """Give settings over a tiny model and 400 short texts."""
    folder = tmp_path_factory.mktemp("recipe")
    tiny_models.build("qwen3_moe").save_pretrained(folder / "model")
    tiny_models.tokenizer().save_pretrained(folder / "model")
    texts = [f"{'word ' * (number % 5)}number {number}." for number in range(400)]
    (folder / "texts.txt").write_text("\n\n".join(texts), encoding="utf-8")
    return CollectConfig(
        model=str(folder / "model"),
        data=str(folder / "texts.txt"),
        out=str(folder / "trace"),
        batch_size=2,
        shard_rows=4,
        device="cpu",
    )


def test_a_killed_recording_is_resumed_to_the_same_rows(recipe, tmp_path, fork) -> None:
    whole, config = replace(recipe, out=str(tmp_path / "whole")), replace(recipe, out=str(tmp_path / "t"))
    collect(whole)
    flags = ("model", "data", "out", "batch_size", "shard_rows", "device")
    words = ["-m", "foregate.cli", "collect", *(f"--{name}={getattr(config, name)}" for name in flags), "--resume"]
    for shards in (1, 20):
        child = fork.start(*words, env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"})
        while child.process.is_alive() and len(list((tmp_path / "t").glob("shard-*"))) < shards:
            child.process.join(0.01)
        child.process.kill()
        assert child.finish(60).returncode == -signal.SIGKILL
        assert list(check_trace(config.out)) == []
    kept = contents(tmp_path / "t")
    assert 20 * recipe.shard_rows <= len(kept) < 400
    result = collect(replace(config, resume=True))
    assert (result.sequences, result.new_sequences) == (400, 400 - len(kept))
    assert contents(tmp_path / "t") == contents(tmp_path / "whole")
    assert list(check_trace(config.out)) == []
    assert leftovers(tmp_path / "t") == []


def fail_at(monkeypatch: pytest.MonkeyPatch, point: str, number: int) -> None:
    """Let the number-th write of a shard, fsync or rename meet a full disk."""
    owner, name = {"write": (pq, "write_table"), "fsync": (os, "fsync"), "rename": (os, "replace")}[point]
    whole, calls = getattr(owner, name), []

    def call(*args, **kwargs):
        calls.append(1)
        if len(calls) >= number:
            if point == "write":
                args[1].write(b"half")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return whole(*args, **kwargs)

    monkeypatch.setattr(owner, name, call)


@pytest.mark.parametrize("shard", [0, 2])
@pytest.mark.parametrize("point", ["write", "fsync", "rename"])
def test_a_full_disk_leaves_a_trace_that_is_valid_or_none(recipe, tmp_path, point, shard) -> None:
    whole, config = replace(recipe, out=str(tmp_path / "whole")), replace(recipe, out=str(tmp_path / "t"))
    whole, config = (replace(item, max_sequences=40) for item in (whole, config))
    with pytest.MonkeyPatch.context() as patch:
        fail_at(patch, point, shard + 1 + (point != "write"))  # the header has an fsync and a rename too
        with pytest.raises(OSError, match="No space left") as raised:
            collect(config)
        assert f"shard-00000-{shard:05d}" in str(raised.value.filename)
    if shard:
        assert list(check_trace(config.out)) == []
        assert len(contents(tmp_path / "t")) == shard * recipe.shard_rows
        assert leftovers(tmp_path / "t") == []
    else:
        assert not (tmp_path / "t").exists()
    collect(replace(config, resume=True))
    collect(whole)
    assert contents(tmp_path / "t") == contents(tmp_path / "whole")


LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), resource.RLIM_INFINITY))
import numpy as np
from foregate.collect.sequence import SequenceRouting
from foregate.collect.topology import MoeTopology
from foregate.collect.trace import TraceHeader
from foregate.collect.writer import TraceWriter, WriterConfig
generator = np.random.default_rng(0)
try:
    header = TraceHeader(topology=MoeTopology.uniform(2, 8, 2))
    with TraceWriter(sys.argv[2], header, config=WriterConfig(shard_rows=1)) as writer:
        for number, length in enumerate((5, 5, 4000, 5)):
            experts = np.argsort(generator.random((length, 2, 8)))[..., :2].reshape(length, 4)
            writer.write(SequenceRouting(sequence=str(number), experts=experts))
except OSError as error:
    print(error.errno, error.filename)
"""


def test_a_real_limit_on_the_size_of_files_leaves_a_valid_trace(tmp_path) -> None:
    path = tmp_path / "t"
    words = [sys.executable, "-c", LIMITED, "6000", str(path)]
    done = subprocess.run(words, check=True, timeout=120, capture_output=True, text=True)
    assert done.stdout.split() == [str(errno.EFBIG), str(path / "shard-00000-00002.parquet")]
    assert list(contents(path)) == ["0", "1"]
    assert list(check_trace(path)) == []
    assert leftovers(path) == []
    with TraceWriter(path, Trace.open(path).header, resume=True) as writer:
        assert [writer.finished(str(number)) for number in range(4)] == [True, True, False, False]


HEADER = TraceHeader(topology=MoeTopology.uniform(2, 8, 1))


def row(sequence: str, num_tokens: int = 3) -> SequenceRouting:
    return SequenceRouting(sequence=sequence, experts=np.arange(2 * num_tokens, dtype=np.int16).reshape(-1, 2) % 8)


def test_a_second_writer_of_the_same_rank_is_refused(tmp_path) -> None:
    path = tmp_path / "t"
    with TraceWriter(path, HEADER) as writer:
        for resume, reason in (
            (False, "holds a trace already"),
            (True, "is being written by another process as rank 0"),
        ):
            with pytest.raises(TraceError, match=reason):
                TraceWriter(path, HEADER, resume=resume)
        with TraceWriter(path, HEADER, config=WriterConfig(rank=1)) as other:
            other.write(row("b"))
        writer.write(row("a"))
    assert [row.sequence for row in Trace.open(path)] == ["a", "b"]
    assert leftovers(path) == []
    with TraceWriter(path, HEADER, resume=True):
        pass


HOLDING = """
import sys
from pathlib import Path
from foregate.collect.lock import WriterLock
lock = WriterLock(Path(sys.argv[1]), int(sys.argv[2]))
print("held", flush=True)
sys.stdin.read()
"""


def test_two_processes_race_and_a_killed_one_leaves_no_stale_lock(tmp_path) -> None:
    words = [sys.executable, "-c", HOLDING, str(tmp_path), "1"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout
        assert child.stdout.readline() == "held\n"
        with pytest.raises(TraceError, match=f"{tmp_path} is being written by another process as rank 1"):
            WriterLock(tmp_path, 1)
        assert others_write(tmp_path, 0)
        assert list(abandoned(tmp_path, 0)) == []
        child.kill()
        child.wait(60)
    assert leftovers(tmp_path) == [".rank-00001.lock"]  # a file, and nobody holds it
    assert not others_write(tmp_path, 1)
    lock = WriterLock(tmp_path, 1)
    lock.release()
    lock.release()
    assert leftovers(tmp_path) == []


def test_what_dead_ranks_left_is_removed_by_rank_0(tmp_path) -> None:
    path = tmp_path / "t"
    with TraceWriter(path, HEADER) as writer:
        writer.write(row("a"))
    (path / ".rank-00003.lock").touch()
    (path / ".shard-00003-00000.parquet.tmp").write_bytes(b"half")
    with TraceWriter(path, HEADER, resume=True):
        assert leftovers(path) == [".rank-00000.lock"]


def test_the_header_of_an_empty_rank_0_stays_for_the_others(tmp_path) -> None:
    path = tmp_path / "t"
    first = TraceWriter(path, HEADER)
    second = TraceWriter(path, HEADER, config=WriterConfig(rank=1))
    first.close()
    assert (path / "trace.json").exists()
    second.write(row("b"))
    second.close()
    assert [row.sequence for row in Trace.open(path)] == ["b"]


def test_the_queue_is_bounded_in_bytes(tmp_path, monkeypatch) -> None:
    entered, go, written = threading.Event(), threading.Event(), []
    write_table = pq.write_table

    def slow(*args, **options):
        entered.set()
        assert go.wait(60)
        return write_table(*args, **options)

    monkeypatch.setattr(pq, "write_table", slow)
    size = row("x", 100).experts.nbytes
    config = WriterConfig(shard_rows=1, queue_bytes=3 * size)
    with TraceWriter(tmp_path / "t", HEADER, config=config) as writer:

        def produce() -> None:
            for number in range(20):
                writer.write(row(f"s{number}", 100))
                written.append(number)

        producer = threading.Thread(target=produce)
        producer.start()
        assert entered.wait(60)
        producer.join(0.2)
        assert producer.is_alive()
        assert len(written) <= 6  # one shard in work, one row after it, three in the queue
        go.set()
        producer.join(60)
        writer.write(row("larger than the whole queue", 1000))
    assert len(list(Trace.open(tmp_path / "t"))) == 21
