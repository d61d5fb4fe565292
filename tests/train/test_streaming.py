"""A trace that is larger than memory: rows are read when needed, few are alive at once, every token counts once."""

from __future__ import annotations

import weakref
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from foregate.collect import row_groups
from foregate.collect.errors import DataError, TraceError
from foregate.collect.topology import MoeLayer, MoeTopology
from foregate.collect.trace import SequenceRouting, Trace, TraceHeader
from foregate.collect.writer import TraceWriter, WriterConfig
from foregate.predictors import rows as row_file
from foregate.train import row_source
from foregate.train.data import Chunks, TraceData
from foregate.train.lazy_rows import LazyRow, Rows

LAYERS, EXPERTS, TOP_K, VOCAB = 3, 8, 2, 30


class Alive:
    """Count rows of a trace that are in memory, and how often each row group was read."""

    def __init__(self) -> None:
        self.now = self.most = 0
        self.reads: Counter[tuple[str, int]] = Counter()

    def read(self, path, group, topology, **options):
        self.reads[path.name, group] += 1
        rows = row_groups.read_row_group(path, group, topology, **options)
        for row in rows:
            self.now += 1
            self.most = max(self.most, self.now)
            weakref.finalize(row.experts.base if row.experts.base is not None else row.experts, self._gone, 1)
        return rows

    def _gone(self, count: int) -> None:
        self.now -= count


def write_both(folder, *, sequences: int = 60, shard_rows: int = 4, long: int = 0):
    """Write the same sequences as a folder of small shards and as an .npz; two stacks never, parts where long."""
    rng = np.random.default_rng(0)
    lengths = [*rng.integers(2, 30, sequences).tolist(), *([9000] if long else [])]
    ids = [rng.integers(0, VOCAB, length) for length in lengths]
    experts = [np.argsort(rng.random((n, LAYERS, EXPERTS)), axis=2)[..., :TOP_K].astype(np.int16) for n in lengths]
    experts[0][0, 0] = [0, EXPERTS - 1]
    layer = MoeLayer(stack="causal", block=0, num_experts=EXPERTS, top_k=TOP_K)
    topology = MoeTopology(layers=tuple(replace(layer, block=block) for block in range(LAYERS)))
    with TraceWriter(
        folder / "folder", TraceHeader(topology=topology), config=WriterConfig(shard_rows=shard_rows)
    ) as writer:
        for n, (row_ids, chosen) in enumerate(zip(ids, experts, strict=True)):
            flat = chosen.reshape(len(row_ids), -1)
            writer.write(SequenceRouting(sequence=str(n), experts=flat, token_ids=row_ids.astype(np.int32)))
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    np.savez(
        folder / "t.npz",
        experts=np.concatenate(experts),
        offsets=offsets,
        token_ids=np.concatenate(ids).astype(np.int32),
    )
    return folder / "folder", folder / "t.npz"


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    return write_both(tmp_path_factory.mktemp("both"))


@pytest.fixture
def alive(monkeypatch) -> Alive:
    counter = Alive()
    monkeypatch.setattr(row_source, "read_row_group", counter.read)
    return counter


def memory_for(rows: float) -> float:
    """Give memory_mib for about that many rows of 16 tokens."""
    return rows * 16 * (2 * LAYERS * TOP_K + 4) / 2**20


def same(one: SequenceRouting, other: SequenceRouting) -> bool:
    named = (one.sequence, one.group, one.stack, one.num_tokens) == (
        other.sequence,
        other.group,
        other.stack,
        other.num_tokens,
    )
    return named and all(np.array_equal(getattr(one, n), getattr(other, n)) for n in ("experts", "token_ids"))


def test_the_rows_are_those_of_the_trace(tmp_path):
    folder, npz = write_both(tmp_path, long=1)
    for path in (folder, npz):
        data = TraceData(path, memory_mib=memory_for(5))
        data.setup()
        wanted = [row for row in row_file.join_parts(Trace.open(path)) if row.num_tokens > 1]
        found = {row.sequence: row for rows in data.rows.values() for row in rows}
        assert len(found) == sum(map(len, data.rows.values())) == len(wanted) == 61
        assert all(same(found[row.sequence], row) for row in wanted)
        assert data.rows["test"].num_tokens == sum(row.num_tokens for row in data.rows["test"])
        whole = Rows(data.source, np.arange(len(data.source)))
        for start, stop in ((0, 3), (4090, 4100), (4095, 8193), (8999, 9000), (0, 9000)):
            part = whole.span(60, start, stop)
            assert np.array_equal(part.experts, wanted[60].experts[start:stop])
            assert np.array_equal(part.token_ids, wanted[60].token_ids[start:stop])  # pyright: ignore


def test_lazy_rows_are_rows(both):
    data = TraceData(both[0])
    rows = data.fitting_rows
    row = rows[3]
    assert isinstance(row, SequenceRouting)
    assert isinstance(row, LazyRow)
    plain = replace(row, experts=row.experts[:2], token_ids=None)
    assert type(plain) is SequenceRouting
    assert (plain.sequence, plain.num_tokens, plain.token_ids) == (row.sequence, 2, None)
    assert [item.sequence for item in rows[1:4]] == [rows[n].sequence for n in (1, 2, 3)]
    assert rows[-1].sequence == list(rows)[-1].sequence
    assert repr(row).startswith("LazyRow(")
    with pytest.raises(AttributeError):
        row.sequence = "other"  # pyright: ignore


def test_memory_stays_bounded_and_every_token_is_seen_once_an_epoch(both, alive):
    data = TraceData(both[0], chunk_tokens=8, context_tokens=3, batch_tokens=48, memory_mib=memory_for(12))
    data.after_tokens = 2
    data.setup()
    loader = data.train_dataloader()
    orders = []
    for epoch in range(3):
        loader.batch_sampler.set_epoch(epoch)  # pyright: ignore
        wanted = Counter(
            (int(token), *chosen.tolist()) for row in data.rows["training"] for token, chosen in _tokens(row)
        )
        alive.reads.clear()
        alive.most = alive.now
        found: Counter[tuple[int, ...]] = Counter()
        batches = 0
        for batch in loader:
            batches += 1
            assert batch.mask.numel() <= 48
            flat = batch.experts.reshape(*batch.ids.shape, -1)
            found.update(
                (int(token), *chosen.tolist())
                for token, chosen in zip(batch.ids[batch.scored], flat[batch.scored], strict=True)
            )
        assert found == wanted
        assert batches == len(loader)
        assert 4 <= alive.most <= 12 * 2 + 8  # the bound counts rows of 16 tokens, and a row group may be in passing
        orders.append(list(loader.batch_sampler))  # pyright: ignore
    assert orders[0] != orders[1]
    assert sum(map(len, orders[0])) == len(Chunks(data.rows["training"], 8, 3))


def _tokens(row: SequenceRouting):
    assert row.token_ids is not None
    return zip(row.token_ids, row.experts, strict=True)


def test_all_rows_are_gone_through_without_keeping_them(both, alive):
    data = TraceData(both[0], memory_mib=memory_for(8))
    data.setup()
    alive.most = alive.now
    ordered = sorted(data.fitting_rows, key=lambda row: -row.num_tokens)  # as evaluation does
    prints = {row_file.fingerprint(row) for row in ordered}
    topology = data.header.topology
    found = row_file.statistics(data.fitting_rows, topology, EXPERTS)
    assert len(prints) == len(ordered)
    assert 4 <= alive.most <= 8 * 2 + 8
    wanted = row_file.statistics(list(TraceData(both[1]).fitting_rows), topology, EXPERTS)
    assert np.array_equal(found.uses_SLE, wanted.uses_SLE)
    assert np.array_equal(found.popularity_LE, wanted.popularity_LE)


@pytest.mark.parametrize("memory", [1024, memory_for(10)])
def test_a_folder_and_an_npz_give_the_same_batches(both, memory):
    loaders = [TraceData(path, batch_tokens=64, chunk_tokens=16, memory_mib=memory) for path in both]
    for name in ("train_dataloader", "val_dataloader"):
        one, other = (list(getattr(data, name)()) for data in loaders)
        assert len(one) == len(other) > 0
        for left, right in zip(one, other, strict=True):
            assert all((a is b is None) or a.equal(b) for a, b in zip(left, right, strict=True))


def test_a_large_block_reads_each_row_group_about_once(both, alive):
    data = TraceData(both[0], batch_tokens=64, memory_mib=memory_for(30))
    data.setup()
    loader = data.train_dataloader()
    alive.reads.clear()
    assert len(list(loader)) == len(loader)
    assert max(alive.reads.values()) <= 3
    small = TraceData(both[0])
    small.setup()
    alive.reads.clear()
    list(small.train_dataloader())
    assert not alive.reads  # all of it was kept when the index was made


def test_a_damaged_shard_and_a_dead_tokenizer_are_refused(tmp_path):
    folder, npz = write_both(tmp_path)
    shard = sorted(folder.glob("*.parquet"))[3]
    good = shard.read_bytes()
    shard.write_bytes(good[:-30])
    with pytest.raises(TraceError, match=r"is damaged.*delete this shard or record the trace again"):
        TraceData(folder).setup()
    with np.load(npz) as file:
        arrays = dict(file)
    np.savez(npz, **{**arrays, "token_ids": np.full_like(arrays["token_ids"], 7)})
    with pytest.raises(DataError, match=r"tokens of .* have the id 7, so nothing can be learned"):
        TraceData(npz).setup()
