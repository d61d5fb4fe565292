"""Events of rows: by hand, beside a slow plain reading, and what is refused."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from foregate.collect.errors import SettingError, TraceError
from foregate.collect.shard import PART_TOKENS, SequenceRouting, split_parts
from foregate.collect.topology import MoeLayer, MoeTopology, Stack
from foregate.runtime import events as events_module
from foregate.runtime.events import Event, Events, Reading, events_of
from hypothesis import given, settings
from hypothesis import strategies as st

PAIR = MoeTopology(
    layers=(
        MoeLayer(stack="encoder", block=1, num_experts=3, top_k=2),
        MoeLayer(stack="decoder", block=0, num_experts=4, top_k=1),
        MoeLayer(stack="decoder", block=1, num_experts=5, top_k=2),
    )
)
WIDTHS: dict[Stack, int] = {"encoder": 2, "decoder": 3}


def one_token(*needed: int) -> Event:
    return Event(needed, True)


def row_of(stack: Stack, experts: Sequence[Sequence[int]], **fields) -> SequenceRouting:
    shaped = np.array(experts, np.int16).reshape(len(experts), WIDTHS[stack])
    return SequenceRouting(sequence=fields.pop("sequence", "a"), stack=stack, experts=shaped, **fields)


def test_rows_become_events_of_their_own_stack() -> None:
    rows = [row_of("encoder", [[2, 0], [-1, 0]]), row_of("decoder", [[3, 4, 0], [-1, -1, -1], [1, 0, 0]])]
    events = events_of(rows, PAIR, "decode")
    assert list(events) == [
        one_token(0, 2),
        one_token(0),
        one_token(6),
        one_token(7, 11),
        one_token(4),  # the decoder's second token was dropped everywhere: no event
        one_token(7),  # an expert chosen twice is needed once
    ]
    assert events.layers.tolist() == [0, 0, 1, 2, 1, 2]
    assert events.steps.tolist() == [0, 1, 2, 2, 4, 4]
    assert events.sequences.tolist() == [0] * 6
    assert (len(events), events.accesses, events.num_tokens) == (6, 8, 5)
    assert list(events_of(rows, PAIR, "prefill")) == [
        Event((0, 2), False),
        Event((4, 6), False),
        Event((7, 11), False),
    ]


def test_a_prefill_of_one_token_is_an_event_of_one_token() -> None:
    assert list(events_of([row_of("encoder", [[2, 0]])], PAIR, "prefill")) == [one_token(0, 2)]


def test_as_recorded_the_prompt_is_a_prefill_and_what_follows_is_decode() -> None:
    rows = [
        row_of("encoder", [[0, 1], [1, 2]], prompt_tokens=1),  # encoders run once, whatever the row says
        row_of("decoder", [[0, 0, 1], [1, 2, 1], [2, 4, 3]], prompt_tokens=2),
        row_of("decoder", [[3, 0, 1], [2, 0, 1]], sequence="b"),  # it does not know its prompt
    ]
    events = events_of(rows, PAIR, "recorded")
    assert list(events) == [
        Event((0, 1, 2), False),
        Event((3, 4), False),
        Event((7, 8, 9), False),
        one_token(5),
        one_token(10, 11),
        Event((5, 6), False),
        Event((7, 8), False),
    ]
    assert events.tokens.tolist() == [2, 2, 2, 1, 1, 2, 2]
    assert events.steps.tolist() == [0, 1, 1, 2, 2, 3, 3]
    assert events.sequences.tolist() == [0, 0, 0, 0, 0, 1, 1]


def test_a_prompt_over_several_parts_is_one_prefill_a_chunk() -> None:
    experts = np.arange(2 * (PART_TOKENS + 3)).reshape(-1, 2) % 3
    whole = SequenceRouting(sequence="a", stack="encoder", experts=experts.astype(np.int16))
    topology = MoeTopology.uniform(1, 3, 2)
    rows = [
        SequenceRouting(sequence="a", experts=part.experts, part=part.part, prompt_tokens=PART_TOKENS + 1)
        for part in split_parts(whole)
    ]
    for given_rows in (rows, [SequenceRouting(sequence="a", experts=whole.experts, prompt_tokens=PART_TOKENS + 1)]):
        events = events_of(given_rows, topology, "recorded")
        assert events.tokens.tolist() == [PART_TOKENS, 1, 1, 1]
        assert events.steps.tolist() == [0, 1, 2, 3]
        assert events.sequences.tolist() == [0, 0, 0, 0]
        assert events_of(given_rows, topology, "prefill").tokens.tolist() == [PART_TOKENS, 3]


def test_an_empty_trace_has_no_events() -> None:
    events = events_of([], PAIR, "decode")
    assert (len(events), events.accesses, events.num_tokens, list(events)) == (0, 0, 0, [])
    nothing = events_of([row_of("decoder", []), row_of("encoder", [[-1, -1]])], PAIR, "prefill")
    assert (len(nothing), nothing.num_tokens) == (0, 1)


def test_an_id_out_of_range_is_refused_before_it_becomes_another_layers() -> None:
    rows = [row_of("decoder", [[0, 0, 0]]), row_of("decoder", [[0, 1, 2], [4, 0, 0]], sequence="bad")]
    with pytest.raises(TraceError, match=r"'bad' names expert 4 where its layer has 4"):
        events_of(rows, PAIR, "decode")


def test_an_unknown_reading_is_refused() -> None:
    with pytest.raises(SettingError, match="decode, prefill, recorded, got 'batch'"):
        events_of([], PAIR, "batch")  # pyright: ignore[reportArgumentType]


def plain(rows: Sequence[SequenceRouting], how: Reading) -> list[tuple[int, int, Event]]:
    """Read rows token by token: (layer, step, event)."""
    found, step = [], 0
    for row in rows:
        prompt = {"decode": 0, "prefill": row.num_tokens}.get(how, row.prompt_tokens)
        if prompt is None or (how == "recorded" and row.stack == "encoder"):
            prompt = row.num_tokens
        prompt = min(prompt, row.num_tokens)
        forwards = [range(prompt)] if prompt else []
        forwards += [range(token, token + 1) for token in range(prompt, row.num_tokens)]
        columns = row.layer_experts(PAIR)
        for tokens in forwards:
            for layer, experts in zip(PAIR.layers_of(row.stack), columns, strict=True):
                chosen = {int(e) for token in tokens for e in experts[token] if e >= 0}
                if chosen:
                    needed = tuple(sorted(PAIR.offsets[layer] + expert for expert in chosen))
                    found.append((layer, step, Event(needed, len(tokens) == 1)))
            step += 1
    return found


@st.composite
def drawn_rows(draw: st.DrawFn) -> list[SequenceRouting]:
    rows = []
    for index in range(draw(st.integers(0, 6))):
        stack: Stack = draw(st.sampled_from(["encoder", "decoder"]))
        sizes = [3, 3] if stack == "encoder" else [4, 5, 5]
        token = st.tuples(*(st.integers(-1, size - 1) for size in sizes))
        experts = draw(st.lists(token, max_size=5))
        prompt = draw(st.none() | st.integers(0, 6))
        rows.append(row_of(stack, experts, sequence=str(index), prompt_tokens=prompt))
    return rows


@pytest.mark.parametrize("how", ["decode", "prefill", "recorded"])
@given(rows=drawn_rows(), batch=st.integers(1, 9))
@settings(max_examples=60, deadline=None)
def test_events_agree_with_a_plain_reading(how: Reading, rows: list[SequenceRouting], batch: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(events_module, "BATCH_TOKENS", batch)
        patch.setattr(events_module, "BLOCK_EVENTS", batch)
        events = events_of(rows, PAIR, how)
        got = list(zip(events.layers.tolist(), events.steps.tolist(), events, strict=True))
    assert got == plain(rows, how)
    assert isinstance(events, Events)
    assert events.num_tokens == sum(row.num_tokens for row in rows)
    assert events.starts[-1] == len(events.experts)
