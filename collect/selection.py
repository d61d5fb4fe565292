"""The scores that a router chose from, taken from its top-k or argmax call itself. Knows tensors, no models or files.

Scores are the very input of the call that gave the ids: logits, probabilities, or probabilities with a balancing bias
and closed groups, whatever the family hands to it. While a `SelectionWatch` is entered, the last calls of `torch.topk`
and `torch.argmax` are kept; the one whose indices are a layer's ids has that layer's scores. Ids that come from
elsewhere, several argmaxes or a table of token ids, have none.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

# N rows of a call, k top-k, E experts

KEPT = 8  # a router with groups calls top-k three times, an attention indexer once or twice in between
TOPK: tuple[Callable[..., Any], ...] = (torch.topk, torch.Tensor.topk)
ARGMAX: tuple[Callable[..., Any], ...] = (torch.argmax, torch.Tensor.argmax)


class SelectionWatch(TorchFunctionMode):
    """Keep the last top-k and argmax calls made inside the `with` block, in this thread."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: deque[tuple[torch.Tensor, torch.Tensor]] = deque(maxlen=KEPT)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a call; note it where it is a top-k or an argmax."""
        result = func(*args, **(kwargs or {}))
        if func in TOPK or func in ARGMAX:
            scores = args[0] if args else (kwargs or {})["input"]
            indices = result[1] if func in TOPK else result.unsqueeze(-1)
            if scores.is_floating_point():  # not the search through a mask of what was chosen
                self._calls.append((scores.detach(), indices.detach()))
        return result

    def scores_of(self, ids_NK: torch.Tensor, num_experts: int) -> torch.Tensor | None:
        """Give the scores [N, E] (float32, a copy) of the latest call that chose these ids; None if none did.

        Args:
            ids_NK: what was recorded; -1 stands for a choice above the experts, such as to skip them, or for one that
                a full expert dropped.
            num_experts: E; choices above it have scores too, which are left out.
        """
        for scores, indices in reversed(self._calls):
            if indices.shape[-1] != ids_NK.shape[-1] or indices.numel() != ids_NK.numel():
                continue
            indices_NK = indices.reshape(ids_NK.shape)
            if scores.shape[-1] < num_experts or scores.shape[:-1] != indices.shape[:-1]:
                continue  # along another dimension
            if bool(((indices_NK == ids_NK) | (ids_NK == -1)).all()):
                self._calls.clear()
                return scores.reshape(ids_NK.shape[0], -1)[:, :num_experts].to(torch.float32, copy=True)
        return None


def wrongly_chosen(ids_NK: torch.Tensor, scores_NE: torch.Tensor) -> torch.Tensor:
    """Say of each row [N] whether its ids are not those of the k largest scores; among equal ones any may be chosen."""
    least_N1 = scores_NE.topk(ids_NK.shape[1], dim=-1).values[:, -1:]
    chosen_NK = scores_NE.gather(1, ids_NK.clamp(min=0).long())
    worse_N = ((chosen_NK < least_N1) & (ids_NK >= 0)).any(dim=-1)
    return worse_N | scores_NE.isnan().any(dim=-1)
