"""Batches: every token counts once, context is real, padding is marked, groups do not leak."""

from __future__ import annotations

import numpy as np
import pytest
from foregate.collect.errors import DataError, SettingError, TraceError
from foregate.predictors.rows import dense, fingerprint, group_of, ids_of
from foregate.train.data import Chunks, LengthSampler, TraceData
from foregate.train.split import SplitSettings


@pytest.mark.parametrize(("chunk", "context"), [(7, 3), (7, 0), (100, 5)])
def test_every_token_counts_once(trace, chunk, context):
    data = TraceData(trace)
    rows = data.fitting_rows
    chunks = Chunks(rows, chunk, context, after_tokens=4)
    counted = [np.zeros(row.num_tokens, int) for row in rows]
    for index in range(len(chunks)):
        batch = chunks.collate([chunks[index]])
        row, start, stop, _ = chunks[index]
        counted[row][start:stop] += batch.scored[0].numpy()
        np.testing.assert_array_equal(batch.ids[0].numpy(), ids_of(rows[row])[start:stop])
        whole = dense(rows[row], data.header.topology)
        np.testing.assert_array_equal(batch.experts[0].numpy(), whole[start:stop])
        np.testing.assert_array_equal(batch.before[0].numpy(), whole[start - 1] if start else -np.ones_like(whole[0]))
        following = np.full((4, *whole.shape[1:]), -1)
        following[: len(whole[stop : stop + 4])] = whole[stop : stop + 4]
        np.testing.assert_array_equal(batch.after[0].numpy(), following)
        assert bool(batch.first[0]) == (start == 0)
    assert all((count == 1).all() for count in counted)


def test_padding_is_marked(trace):
    data = TraceData(trace)
    chunks = Chunks(data.fitting_rows, 30, 4)
    batch = chunks.collate([chunks[0], chunks[1], chunks[2]])
    assert (batch.ids[~batch.mask] == -1).all()
    assert (batch.experts[~batch.mask] == -1).all()
    assert not batch.scored[~batch.mask].any()


def test_batches_keep_their_budget_and_change_between_epochs(trace):
    data = TraceData(trace, chunk_tokens=16)
    lengths = Chunks(data.fitting_rows, 16, 4).lengths
    sampler = LengthSampler(lengths, 64, seed=3)
    orders = []
    for epoch in (0, 1, 0):
        sampler.set_epoch(epoch)
        batches = list(sampler)
        assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
        assert all(max(lengths[batch]) * len(batch) <= 64 for batch in batches)
        assert len(sampler) == len(batches)
        orders.append(batches)
    assert orders[0] == orders[2] != orders[1]


def test_groups_do_not_leak(trace):
    data = TraceData(trace)
    data.setup()
    groups = {part: {group_of(row) for row in rows} for part, rows in data.rows.items()}
    assert not groups["training"] & groups["test"]
    assert not groups["training"] & groups["validation"]
    assert not groups["validation"] & groups["test"]
    prints = [fingerprint(row) for rows in data.rows.values() for row in rows]
    assert len(prints) == len(set(prints)) == 24


def test_categories_do_not_leak_where_they_are_dealt_out(trace, tmp_path):
    with np.load(trace) as file:
        names = np.array([f"kind {int(number) % 5}" for number in file["conversation"]])
        np.savez(tmp_path / "kinds.npz", **{**file, "category": names})
    data = TraceData(tmp_path / "kinds.npz", split=SplitSettings(by="category"))
    data.setup()
    kinds = {part: {row.category for row in rows} for part, rows in data.rows.items()}
    assert [len(kinds[part]) for part in ("training", "validation", "test")] == [3, 1, 1]
    assert len(set.union(*kinds.values())) == 5
    with pytest.raises(DataError, match=r"has no category, and data\.split\.by is category"):
        TraceData(trace, split=SplitSettings(by="category")).setup()
    with pytest.raises(SettingError, match="by must be one of group, category, got 'colour'"):
        SplitSettings(by="colour")  # pyright: ignore[reportArgumentType]


def test_bad_data_is_refused(trace, write, tmp_path):
    with pytest.raises(DataError, match=r"no stack 'encoder'; its stacks are causal"):
        TraceData(trace, stack="encoder").setup()
    with pytest.raises(DataError, match="at least 3 groups"):
        TraceData(write(tmp_path / "few.npz", sequences=4)).setup()
    with pytest.raises(TraceError, match="nowhere"):
        TraceData(tmp_path / "nowhere").setup()
    with pytest.raises(SettingError, match="chunk_tokens"):
        TraceData(trace, chunk_tokens=1)


def test_a_trace_without_ids_has_only_unknown_ones(write, tmp_path):
    data = TraceData(write(tmp_path / "t.npz", ids=False))
    assert data.vocab_size == 0
    assert all((batch.ids == -1).all() for batch in data.train_dataloader())


def test_an_id_beyond_every_vocabulary_is_refused(write, tmp_path):
    """An embedding has a place for each id below the largest: 16 GiB of them for the largest int32."""
    path = write(tmp_path / "t.npz")
    with np.load(path) as file:
        arrays = dict(file)
    arrays["token_ids"][5] = 2**31 - 1
    np.savez(path, **arrays)
    with pytest.raises(DataError, match="has the token id 2147483647; ids below 16777216 are legal"):
        TraceData(path).setup()
