"""The trace writer: what is written is read back, and no failure leaves a broken trace."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from foregate.collect.checks import check_trace
from foregate.collect.errors import ClosedError, SettingError, TraceError
from foregate.collect.shard import PART_TOKENS
from foregate.collect.topology import STACKS, MoeLayer, MoeTopology
from foregate.collect.trace import SequenceRouting, Trace, TraceHeader
from foregate.collect.writer import TraceWriter, WriterConfig
from hypothesis import given, settings
from hypothesis import strategies as st

SMALL = WriterConfig(shard_rows=3)


def assert_same(a: SequenceRouting, b: SequenceRouting) -> None:
    names = ("sequence", "stack", "part", "group", "category", "source", "prompt_tokens", "text")
    assert {name: getattr(a, name) for name in names} == {name: getattr(b, name) for name in names}
    for name in ("experts", "token_ids", "weights"):
        left, right = getattr(a, name), getattr(b, name)
        assert (left is None) == (right is None), name
        if left is not None:
            assert left.dtype == right.dtype
            np.testing.assert_array_equal(left, right)


def test_round_trip(tmp_path, header, make_row) -> None:
    rows = [
        make_row(f"s{i}", i + 1, group=f"g{i % 2}", category="c", source=f"d:{i}", prompt_tokens=1) for i in range(7)
    ]
    rows += [make_row("bare", 4, weights=None), make_row("no tokens", 4, token_ids=None)]
    with TraceWriter(tmp_path / "t", header, config=SMALL) as writer:
        for row in rows:
            writer.write(row)
    trace = Trace.open(tmp_path / "t")
    assert trace.header == header
    assert [shard.name for shard in trace.shards] == [f"shard-00000-{i:05d}.parquet" for i in range(3)]
    for written, read in zip(rows, trace, strict=True):
        assert_same(written, read)
    assert writer.statistics()[:4] == (9, 9, sum(row.num_tokens for row in rows), 3)
    assert list(check_trace(tmp_path / "t")) == []


@st.composite
def traces(draw: st.DrawFn) -> tuple[TraceHeader, list[SequenceRouting]]:
    layers = draw(
        st.lists(
            st.tuples(st.sampled_from(STACKS), st.integers(1, 40)).flatmap(
                lambda item: st.tuples(st.just(item[0]), st.just(item[1]), st.integers(1, min(4, item[1])))
            ),
            min_size=1,
            max_size=5,
        )
    )
    layers.sort(key=lambda item: STACKS.index(item[0]))
    topology = MoeTopology(
        layers=tuple(
            MoeLayer(stack=stack, block=i, num_experts=experts, top_k=top_k)
            for i, (stack, experts, top_k) in enumerate(layers)
        )
    )
    generator = np.random.default_rng(draw(st.integers(0, 2**32)))
    rows = []
    for number in range(draw(st.integers(1, 6))):
        for stack in topology.stacks:
            num_tokens = draw(st.integers(1, 30))
            chosen = [layer for layer in topology.layers if layer.stack == stack]
            experts = np.concatenate(
                [np.argsort(generator.random((num_tokens, x.num_experts)), axis=1)[:, : x.top_k] for x in chosen],
                axis=1,
            ).astype(np.int16)
            for column, layer in zip(np.cumsum([0] + [x.top_k for x in chosen[:-1]]), chosen, strict=True):
                if layer.top_k == 1:
                    experts[0, column] = layer.num_experts - 1  # not nothing but expert 0
            experts[1:][generator.random(experts[1:].shape) < draw(st.sampled_from([0.0, 0.3]))] = -1
            rows.append(
                SequenceRouting(
                    sequence=f"{number} \u00e9",
                    stack=stack,
                    experts=experts,
                    group=draw(st.none() | st.text(max_size=5)),
                    token_ids=draw(st.none() | st.just(generator.integers(0, 2**31 - 1, num_tokens, dtype=np.int32))),
                    weights=draw(st.none() | st.just(generator.normal(size=experts.shape).astype(np.float16))),
                    prompt_tokens=draw(st.none() | st.integers(0, num_tokens)),
                )
            )
    return TraceHeader(topology=topology, generation=draw(st.dictionaries(st.text(), st.integers()))), rows


@settings(max_examples=40, deadline=None)
@given(content=traces(), shard_rows=st.integers(1, 4), queue_rows=st.integers(1, 3), together=st.booleans())
def test_any_trace_round_trips(tmp_path_factory, content, shard_rows, queue_rows, together) -> None:
    header, rows = content
    path = tmp_path_factory.mktemp("trace") / "t"
    config = WriterConfig(shard_rows=shard_rows, queue_rows=queue_rows)
    with TraceWriter(path, header, config=config) as writer:
        size = len(header.topology.stacks) if together else 1
        for start in range(0, len(rows), size):
            writer.write(*rows[start : start + size])
    trace = Trace.open(path)
    assert trace.header == header
    for written, read in zip(rows, trace, strict=True):
        assert_same(written, read)
    for shard in trace.shards:  # a sequence never straddles shards
        others = {row.sequence for other in trace.shards if other != shard for row in Trace(path, header, [other])}
        assert not others & {row.sequence for row in Trace(path, header, [shard])}


def test_long_sequences_continue_in_parts(tmp_path, header, make_row) -> None:
    long = make_row("long", 2 * PART_TOKENS + 5, prompt_tokens=PART_TOKENS + 1, text="words")
    with TraceWriter(tmp_path / "t", header, text=True, config=SMALL) as writer:
        writer.write(make_row("short"))
        writer.write(long)
        writer.write(make_row("other"))
    trace = Trace.open(tmp_path / "t")
    parts = [row for row in trace if row.sequence == "long"]
    assert [(row.part, row.num_tokens) for row in parts] == [(0, PART_TOKENS), (1, PART_TOKENS), (2, 5)]
    joined = list(trace.sequences())
    assert [row.sequence for row in joined] == ["short", "long", "other"]
    assert_same(joined[1], long)
    assert list(check_trace(tmp_path / "t")) == []


def test_a_missing_part_is_an_error(tmp_path, header, make_row) -> None:
    with TraceWriter(tmp_path / "t", header) as writer, pytest.raises(TraceError, match="follows part -1"):
        writer.write(make_row("a", part=1))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda row: replace(row, experts=np.where(row.experts == 7, 8, row.experts)), "out of range 0..7"),
        (lambda row: replace(row, experts=row.experts.astype(np.int64) + 2**16), "out of range"),
        (lambda row: replace(row, experts=row.experts * 0 + 1), "are not distinct"),
        (lambda row: replace(row, experts=row.experts * 0 - 1), "nothing was recorded"),
        (lambda row: replace(row, experts=row.experts[:, :-1]), r"must be integers \[tokens, 6\]"),
        (lambda row: replace(row, experts=row.experts.astype(np.float32)), "must be integers"),
        (lambda row: replace(row, experts=row.experts[:0], token_ids=None, weights=None), "no tokens"),
        (lambda row: replace(row, token_ids=row.token_ids[:-1]), "lists 39 token ids"),
        (lambda row: replace(row, token_ids=row.token_ids + 100), r"legal is 0\.\.99"),
        (lambda row: replace(row, token_ids=row.token_ids - 100), r"legal is 0\.\.99"),
        (lambda row: replace(row, weights=row.weights[:, :-1]), "its weights are"),
        (lambda row: replace(row, weights=row.weights + np.float16("nan")), "not all finite"),
        (lambda row: replace(row, weights=row.weights.astype(np.float32) + 1e6), "not all finite"),
        (lambda row: replace(row, stack="encoder"), "the topology has only causal"),
        (lambda row: replace(row, sequence=""), "no sequence id"),
        (lambda row: replace(row, prompt_tokens=41), "prompt_tokens is 41"),
    ],
)
def test_bad_rows_are_refused_and_the_writer_goes_on(tmp_path, header, make_row, change, reason) -> None:
    row = make_row("a", 40)
    assert (row.experts == 7).any()
    with TraceWriter(tmp_path / "t", header) as writer:
        with pytest.raises(TraceError, match=reason):
            writer.write(change(row))
        writer.write(row)
    assert [row.sequence for row in Trace.open(tmp_path / "t")] == ["a"]


@pytest.mark.parametrize(
    ("kind", "scale", "reason"),
    [("none", 1.0, "declares none"), ("unit", 3.0, "0..1"), ("normalized", 0.5, "sum to"), ("finite", 9.0, None)],
)
def test_weights_are_held_to_the_header(tmp_path, header, make_row, kind, scale, reason) -> None:
    row = make_row("a", 40)
    weights = np.full(row.experts.shape, [1 / 2, 1 / 2, 1 / 3, 1 / 3, 1 / 3, 1.0]) * scale
    with TraceWriter(tmp_path / "t", replace(header, weights=kind)) as writer:
        if reason:
            with pytest.raises(TraceError, match=reason):
                writer.write(replace(row, weights=weights))
        else:
            writer.write(replace(row, weights=weights))
        if kind in ("unit", "normalized"):
            writer.write(replace(row, sequence="b", weights=weights / scale))
            with pytest.raises(TraceError, match="has no weights"):
                writer.write(replace(row, weights=None))


def test_rows_of_nothing_but_expert_zero_are_refused(tmp_path) -> None:
    header = TraceHeader(topology=MoeTopology.uniform(4, 8, 1))
    writer = TraceWriter(tmp_path / "t", header)
    writer.write(SequenceRouting(sequence="a", experts=np.zeros((9, 4), np.int16)))
    with pytest.raises(TraceError, match="a router that never ran"):
        writer.close()
    assert not (tmp_path / "t").exists()


def test_a_dummy_batch_is_reported(tmp_path, header, make_row, caplog) -> None:
    row = make_row("a", 9)
    with TraceWriter(tmp_path / "t", header) as writer:
        for number in range(20):
            writer.write(replace(row, sequence=f"dummy {number}"))
    assert "warm-up or dummy batch" in caplog.text


def test_a_sequence_stands_once(tmp_path, header, make_row) -> None:
    with TraceWriter(tmp_path / "t", header) as writer:
        writer.write(make_row("a"))
        with pytest.raises(TraceError, match="stands twice"):
            writer.write(make_row("a"))


def test_an_existing_trace_is_not_written_over(tmp_path, header, make_row) -> None:
    path = tmp_path / "t"
    with TraceWriter(path, header) as writer:
        writer.write(make_row("a"))
    before = {item.name: item.read_bytes() for item in path.iterdir()}
    with pytest.raises(TraceError, match="holds a trace already; give --resume"):
        TraceWriter(path, header)
    assert {item.name: item.read_bytes() for item in path.iterdir()} == before


@pytest.mark.parametrize("resume", [False, True])
def test_other_files_are_not_written_beside(tmp_path, header, resume) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(TraceError, match=r"holds notes\.txt"):
        TraceWriter(tmp_path, header, resume=resume)
    with pytest.raises(TraceError, match="is a file"):
        TraceWriter(tmp_path / "notes.txt", header, resume=resume)
    assert [item.name for item in tmp_path.iterdir()] == ["notes.txt"]


def test_resume_goes_on_without_duplicates(tmp_path, header, make_row) -> None:
    path = tmp_path / "t"
    for start in (0, 3, 6):
        newer = replace(header, versions={"torch": str(start)})  # a library may have been upgraded in between
        with TraceWriter(path, newer, resume=True, config=SMALL) as writer:
            assert writer.statistics().resumed_sequences == start
            assert writer.statistics().resumed_tokens == 5 * start
            for number in range(start + 3):
                if not writer.finished(f"s{number}"):
                    writer.write(make_row(f"s{number}"))
            if start:
                with pytest.raises(TraceError, match="in the trace already"):
                    writer.write(make_row("s0"))
    assert [row.sequence for row in Trace.open(path)] == [f"s{number}" for number in range(9)]
    assert list(check_trace(path)) == []


def test_resume_refuses_another_header(tmp_path, header, make_row) -> None:
    path = tmp_path / "t"
    with TraceWriter(path, header) as writer:
        writer.write(make_row("a"))
    with pytest.raises(TraceError, match="recorded with seed 3, this run has 4"):
        TraceWriter(path, replace(header, seed=4), resume=True)
    with pytest.raises(TraceError, match="recorded with topology '3 causal layers"):
        TraceWriter(path, replace(header, topology=MoeTopology.uniform(2, 8, 2)), resume=True)


def test_resume_refuses_a_damaged_shard(tmp_path, header, make_row) -> None:
    path = tmp_path / "t"
    with TraceWriter(path, header) as writer:
        writer.write(make_row("a"))
    shard = next(path.glob("shard-*"))
    shard.write_bytes(shard.read_bytes()[:-20])
    with pytest.raises(TraceError, match=r"is damaged .*delete this shard"):
        TraceWriter(path, header, resume=True)


def test_ranks_share_a_trace(tmp_path, header, make_row) -> None:
    path = tmp_path / "t"
    with TraceWriter(path, header) as first, TraceWriter(path, header, config=WriterConfig(rank=1)) as second:
        first.write(make_row("a"))
        second.write(make_row("b"))
    assert [shard.name for shard in Trace.open(path).shards] == [
        "shard-00000-00000.parquet",
        "shard-00001-00000.parquet",
    ]
    with pytest.raises(TraceError, match="holds a trace already"):
        TraceWriter(path, header, config=WriterConfig(rank=1))


def failing_write(after: int):
    """Give a Parquet writer that meets a full disk at call number `after`, having written half a file."""
    calls, write_table = [], pq.write_table

    def write(table, file, **options):
        calls.append(1)
        if len(calls) > after:
            file.write(b"half")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write_table(table, file, **options)

    return write


def test_a_full_disk_reaches_the_caller_and_leaves_a_valid_trace(tmp_path, header, make_row, monkeypatch) -> None:
    monkeypatch.setattr(pq, "write_table", failing_write(after=2))
    path = tmp_path / "t"
    writer = TraceWriter(path, header, config=WriterConfig(shard_rows=2, queue_rows=1))

    def write_many() -> None:
        for number in range(1000):  # must not block although the thread has stopped writing
            writer.write(make_row(f"s{number}"))

    with pytest.raises(OSError, match="No space left") as raised:
        write_many()
    assert raised.value.errno == errno.ENOSPC
    assert "shard-00000-00002" in raised.value.filename
    assert writer.statistics().rows < 1000
    with pytest.raises(ClosedError):
        writer.write(make_row("late"))
    writer.close()
    writer.close()
    assert sorted(item.name for item in path.iterdir()) == [
        "shard-00000-00000.parquet",
        "shard-00000-00001.parquet",
        "trace.json",
    ]
    assert list(check_trace(path)) == []
    assert len(list(Trace.open(path))) == 4
    monkeypatch.undo()
    with TraceWriter(path, header, resume=True) as writer:
        writer.write(make_row("s4"))
    assert len(list(Trace.open(path))) == 5


def test_a_full_disk_at_close_reaches_the_caller_and_nothing_is_left(tmp_path, header, make_row, monkeypatch) -> None:
    monkeypatch.setattr(pq, "write_table", failing_write(after=0))
    with pytest.raises(OSError, match="No space left"), TraceWriter(tmp_path / "t", header) as writer:
        writer.write(make_row("a"))
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_at_the_header_leaves_nothing(tmp_path, header, monkeypatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"No space left on device: .*trace\.json"):
        TraceWriter(tmp_path / "t", header)
    assert list(tmp_path.iterdir()) == []


def test_a_real_full_device_is_the_same_error(tmp_path, header, make_row) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    path = tmp_path / "t"
    writer = TraceWriter(path, header)
    (path / ".shard-00000-00000.parquet.tmp").symlink_to("/dev/full")
    writer.write(make_row("a"))
    with pytest.raises(OSError, match="No space left"):
        writer.close()
    assert list(tmp_path.iterdir()) == []


def test_the_callers_error_wins_and_its_rows_are_kept(tmp_path, header, make_row) -> None:
    def run() -> None:
        with TraceWriter(tmp_path / "t", header) as writer:
            writer.write(make_row("a"))
            raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        run()
    assert [row.sequence for row in Trace.open(tmp_path / "t")] == ["a"]


def test_an_empty_run_leaves_nothing(tmp_path, header) -> None:
    with TraceWriter(tmp_path / "t", header):
        assert (tmp_path / "t" / "trace.json").exists()
    assert list(tmp_path.iterdir()) == []


def test_closing_joins_the_thread(tmp_path, header, make_row) -> None:
    before = threading.active_count()
    with TraceWriter(tmp_path / "t", header) as writer:
        writer.write(make_row("a"))
    assert threading.active_count() == before
    with pytest.raises(ClosedError, match="is closed"):
        writer.write(make_row("b"))


def test_the_queue_is_bounded(tmp_path, header, make_row, monkeypatch) -> None:
    entered, go = threading.Event(), threading.Event()
    write_table = pq.write_table

    def slow(table, file, **options):
        entered.set()
        assert go.wait(30)
        return write_table(table, file, **options)

    monkeypatch.setattr(pq, "write_table", slow)
    written: list[int] = []
    with TraceWriter(tmp_path / "t", header, config=WriterConfig(shard_rows=1, queue_rows=2)) as writer:

        def produce() -> None:
            for number in range(50):
                writer.write(make_row(f"s{number}"))
                written.append(number)

        producer = threading.Thread(target=produce)
        producer.start()
        assert entered.wait(30)
        producer.join(0.2)
        assert producer.is_alive()
        assert len(written) <= 5  # one shard in work, one row after it, two in the queue
        go.set()
        producer.join(30)
    assert len(list(Trace.open(tmp_path / "t"))) == 50


CHILD = """
import sys, numpy as np
from foregate.collect.topology import MoeTopology
from foregate.collect.trace import SequenceRouting, TraceHeader
from foregate.collect.writer import TraceWriter, WriterConfig
header = TraceHeader(topology=MoeTopology.uniform(2, 8, 2))
with TraceWriter(sys.argv[1], header, resume=True, config=WriterConfig(shard_rows=10)) as writer:
    for number in range(100_000):
        if not writer.finished(str(number)):
            experts = np.argsort(np.random.default_rng(number).random((4, 2, 8)))[..., :2].reshape(4, 4)
            writer.write(SequenceRouting(sequence=str(number), experts=experts))
            if number % 10 == 9:
                print(number, flush=True)
"""


def test_a_killed_run_loses_at_most_its_open_shard(tmp_path) -> None:
    path, finished = tmp_path / "t", 0
    for kill_at in (95, 205):
        child = subprocess.Popen([sys.executable, "-c", CHILD, str(path)], stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        with child.stdout:
            for line in child.stdout:
                if int(line) >= kill_at:
                    child.send_signal(signal.SIGKILL)
                    break
        child.wait()
        ids = [int(row.sequence) for row in Trace.open(path)]
        assert ids == list(range(len(ids)))
        assert len(ids) >= kill_at - 10 - 64  # the open shard and the queue
        assert len(ids) >= finished
        assert list(check_trace(path)) == []
        finished = len(ids)
    header = Trace.open(path).header
    with TraceWriter(path, header, resume=True):
        assert not list(path.glob(".*.tmp"))


def test_settings_out_of_range_are_refused() -> None:
    for name in ("shard_rows", "shard_bytes", "queue_rows"):
        with pytest.raises(SettingError, match=f"{name} must be at least 1, got 0"):
            WriterConfig(**{name: 0})
    with pytest.raises(SettingError, match="rank must be at least 0, got -1"):
        WriterConfig(rank=-1)


def test_shards_open_with_other_tools(tmp_path, header, make_row, monkeypatch) -> None:
    datasets = pytest.importorskip("datasets")
    path = tmp_path / "t"
    with TraceWriter(path, header, text=True) as writer:
        writer.write(make_row("a", 3, text="abc"))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    table = datasets.Dataset.from_parquet(str(next(path.glob("shard-*"))), cache_dir=str(tmp_path / "cache"))
    assert table[0]["sequence"] == "a"
    assert table[0]["text"] == "abc"
    assert len(table[0]["experts"]) == 18
    assert len(table[0]["weights"]) == 18
