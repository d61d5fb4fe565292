"""From what the recorder took to one array per sequence: padding left out, steps of a generation put in order.

Knows batches and masks; knows no texts, files or models. A forward over a padded batch calls each layer once with B * T
rows; a generation calls it once with B * P rows for the prompts and then once per step with B rows.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from .errors import ModelError
from .recorder import LayerRouting
from .topology import MoeTopology, Stack

# B batch, P prompt tokens (padded), G generated tokens (padded), T tokens of one sequence, W columns of a trace row,
# S scores of one, L MoE layers of a stack, H hidden size


class Recorded(NamedTuple):
    """Hold one sequence's tokens and routing in one stack."""

    token_ids: np.ndarray
    """int32 [T]."""
    experts: np.ndarray
    """int16 [T, W]."""
    weights: np.ndarray
    """float16 [T, W], as in a trace; infinite where a weight is larger."""
    scores: np.ndarray | None = None
    """float32 [T, S], the layers' scores side by side; None where not recorded."""
    hidden: np.ndarray | None = None
    """float16 [T, L * H], the layers' hidden states side by side; None where not recorded."""


def record_forward(
    topology: MoeTopology, routing: Sequence[LayerRouting], stack: Stack, ids_BP: np.ndarray, mask_BP: np.ndarray
) -> list[Recorded]:
    """Cut one forward of a padded batch into sequences; the mask is True on tokens, on whichever side the padding is.

    Raises:
        ModelError: if a layer was called more than once, or with another number of rows.
    """
    layers = [routing[index] for index in topology.layers_of(stack)]
    _expect(topology, layers, stack, (ids_BP.size,))
    columns = _columns([layer.by_call()[0] for layer in layers], ids_BP.shape)
    tokens_BP = ids_BP.astype(np.int32)
    if mask_BP.all():  # views: a batch that is all tokens takes no more memory than its sequences
        cuts: list[Any] = [slice(None)] * len(mask_BP)
    else:
        cuts = list(mask_BP)
    recorded = []
    for row, cut in enumerate(cuts):
        parts: list[Any] = [None if part is None else part[row][cut] for part in columns]
        recorded.append(Recorded(tokens_BP[row][cut], *parts))
    return recorded


def record_generation(
    topology: MoeTopology,
    routing: Sequence[LayerRouting],
    stack: Stack,
    ids_BP: np.ndarray,
    mask_BP: np.ndarray,
    generated_BG: np.ndarray,
    end_ids: Collection[int],
) -> list[Recorded]:
    """Cut one generation of a batch into sequences: the prompt and every generated token that was fed back.

    The last token of a sequence was never fed back and has no routing, so it is left out; what a batch goes on feeding
    to a finished sequence is left out too.

    Args:
        topology: of the model.
        routing: what the recorder took.
        stack: causal, or the decoder of a pair.
        ids_BP: prompts, padded on the left; of a decoder, its start tokens.
        mask_BP: True on tokens.
        generated_BG: new tokens; those after a sequence's first end token do not count.
        end_ids: tokens that end a sequence.

    Raises:
        ModelError: if the layers' calls are not one prompt and one step per new token.
    """
    batch, num_new = generated_BG.shape
    layers = [routing[index] for index in topology.layers_of(stack)]
    _expect(topology, layers, stack, (ids_BP.size, *[batch] * (num_new - 1)))
    calls = [layer.by_call() for layer in layers]
    prompts = _columns([call[0] for call in calls], ids_BP.shape)
    steps = [_columns([call[1 + step] for call in calls], (batch,)) for step in range(num_new - 1)]
    is_end_BG = np.isin(generated_BG, list(end_ids))
    lengths_B = np.where(is_end_BG.any(1), is_end_BG.argmax(1) + 1, num_new) - 1
    recorded = []
    for index in range(batch):
        mask, length = mask_BP[index], int(lengths_B[index])
        parts: list[Any] = [
            None
            if prompt is None
            else np.concatenate([prompt[index][mask], *(step[part][index][None] for step in steps[:length])])
            for part, prompt in enumerate(prompts)
        ]
        token_ids = np.concatenate([ids_BP[index][mask], generated_BG[index, :length]]).astype(np.int32)
        recorded.append(Recorded(token_ids, *parts))
    return recorded


def _columns(calls: Sequence[tuple[np.ndarray | None, ...]], shape: tuple[int, ...]) -> list[Any]:
    """Put the layers of one call side by side: experts and weights [*shape, W]; scores [*shape, S] and hidden states
    [*shape, L * H], or None."""
    parts: list[Any] = [
        None if any(values is None for values in part) else np.concatenate(part, axis=1).reshape(*shape, -1)
        for part in zip(*calls, strict=True)
    ]
    # by PyTorch, for the whole batch: NumPy takes 88 microseconds for 1024 tokens x 24 weights, PyTorch 6
    parts[1] = torch.from_numpy(parts[1]).half().numpy()
    return parts


def _expect(topology: MoeTopology, layers: Sequence[LayerRouting], stack: Stack, calls: tuple[int, ...]) -> None:
    for index, layer in zip(topology.layers_of(stack), layers, strict=True):
        if layer.calls != calls:
            raise ModelError(
                f"MoE layer {index} ({stack}) was called {len(layer.calls)} times with {_few(layer.calls)} rows, "
                f"expected {len(calls)} times with {_few(calls)}; a family that splits its tokens cannot be recorded "
                "by sequence."
            )


def _few(calls: tuple[int, ...]) -> str:
    return ", ".join(map(str, calls[:3])) + (", ..." if len(calls) > 3 else "")
