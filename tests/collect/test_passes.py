"""Passes over batches of unusual models: rows of both stacks, scores, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from foregate.collect import tiny_models
from foregate.collect.batches import Piece
from foregate.collect.corpora import Document
from foregate.collect.errors import SettingError
from foregate.collect.passes import Generation, Passes
from foregate.collect.recorder import RoutingRecorder


def pieces(*lengths: int, target: list[int] | None = None) -> list[Piece]:
    generator = np.random.default_rng(1)
    return [
        Piece(str(n), generator.integers(4, 260, length).tolist(), target, Document(source=str(n), text=""), None)
        for n, length in enumerate(lengths)
    ]


def test_a_canvas_is_the_decoders_row_and_begins_with_the_target() -> None:
    model = tiny_models.build("diffusion_gemma")
    with RoutingRecorder(model) as recorder:
        passes = Passes(model, recorder, tiny_models.tokenizer(), None)
        rows = passes(pieces(5, 9, target=[7, 8, 9]), 3)
        again = passes(pieces(5, 9, target=[7, 8, 9]), 3)
    for length, (encoder, decoder) in zip((5, 9), rows, strict=True):
        assert (encoder.stack, decoder.stack) == ("encoder", "decoder")
        assert encoder.experts.shape == (length, 2 * 3)
        assert decoder.experts.shape == (16, 2 * 3)
        assert decoder.token_ids is not None
        assert decoder.token_ids[:3].tolist() == [7, 8, 9]
    assert rows[0][1].token_ids.tolist() != rows[1][1].token_ids.tolist()
    for left, right in zip(rows, again, strict=True):
        for one, other in zip(left, right, strict=True):
            np.testing.assert_array_equal(one.experts, other.experts)
            np.testing.assert_array_equal(one.token_ids, other.token_ids)


@pytest.mark.parametrize(
    ("name", "how"), [("diffusion_gemma", "refines a canvas"), ("openai_privacy_filter", "does not generate")]
)
def test_models_that_generate_no_text_are_recorded_without_generation(name: str, how: str) -> None:
    model = tiny_models.build(name)
    with RoutingRecorder(model) as recorder:
        with pytest.raises(SettingError, match=rf"generate must be 0 for .*, which {how}"):
            Passes(model, recorder, tiny_models.tokenizer(), Generation(max_new_tokens=2))
        (rows,) = Passes(model, recorder, tiny_models.tokenizer(), None)(pieces(4), 0)
    assert rows[0].num_tokens == 4


@pytest.mark.parametrize("generation", [None, Generation(max_new_tokens=3)])
def test_scores_stand_beside_the_ids_of_their_tokens(generation: Generation | None) -> None:
    model = tiny_models.build("ernie4_5_moe")
    with RoutingRecorder(model, scores=True) as recorder:
        rows = Passes(model, recorder, tiny_models.tokenizer(), generation)(pieces(3, 8), 0)
    for (row,) in rows:
        assert row.scores is not None
        assert row.scores.shape == (row.num_tokens, 16)
        for layer in range(2):
            best = np.argsort(-row.scores[:, 8 * layer : 8 * layer + 8], axis=1, kind="stable")[:, :3]
            chosen = row.experts[:, 3 * layer : 3 * layer + 3]
            np.testing.assert_array_equal(np.sort(best, axis=1), np.sort(chosen, axis=1))


def test_a_model_around_one_that_reads_text_is_recorded_through_it() -> None:
    model = tiny_models.build("qwen3_omni_moe")
    with RoutingRecorder(model) as recorder:
        (rows,) = Passes(model, recorder, tiny_models.tokenizer(), Generation(max_new_tokens=3))(pieces(6), 0)
    assert rows[0].prompt_tokens == 6
    assert rows[0].num_tokens in (6, 7, 8)
    assert torch.is_grad_enabled()
