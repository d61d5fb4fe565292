"""Checks of single rows of a routing trace: what one row and the header say. Knows no files and no other rows.

Ids in range, k distinct or -1 per token and MoE layer, weights as declared, token ids aligned, and, where scores are
recorded, that their top-k gives the recorded ids.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby, pairwise
from math import isfinite

import numpy as np

from .sequence import PART_TOKENS, SequenceRouting, columns_of
from .trace import TraceHeader

# T tokens, k top-k, E experts of a layer

WEIGHT_SLACK = 0.02  # float16 weights of eight experts sum to 1 within 0.004


class RowCheck:
    """Check single rows against a header; holds no state between rows."""

    def __init__(self, header: TraceHeader) -> None:
        self.header, self.columns = header, columns_of(header.topology)
        self.least_limit = {stack: int(columns.limits_W.min()) for stack, columns in self.columns.items()}
        # layers of equal k: how many, their k, their first column
        self.runs: dict[str, list[tuple[int, int, int]]] = {}
        for stack, columns in self.columns.items():
            start, runs = 0, []
            for top_k, layers in groupby(np.diff(columns.bounds).tolist()):
                num_layers = len(list(layers))
                runs.append((num_layers, top_k, start))
                start += num_layers * top_k
            self.runs[stack] = runs

    def __call__(self, row: SequenceRouting) -> list[str]:
        """List what is wrong with a row, in words; empty where nothing is."""
        if row.stack not in self.columns:
            return [f"its stack is {row.stack!r}, the topology has only {', '.join(self.columns)}"]
        width = self.columns[row.stack].width
        if row.experts.ndim != 2 or row.experts.shape[1] != width or row.experts.dtype.kind not in "iu":
            return [f"its experts must be integers [tokens, {width}], got {row.experts.dtype} {row.experts.shape}"]
        found = [*self._fields(row), *self._tokens(row), *self._weights(row), *self._hidden(row)]
        if not row.num_tokens:
            return [*found, "it has no tokens"]
        wrong = list(self._experts(row))
        return [*found, *wrong, *([] if wrong else self._scores(row))]

    def _fields(self, row: SequenceRouting) -> Iterator[str]:
        if not row.sequence:
            yield "it has no sequence id"
        for name in ("sequence", "group", "category", "source"):
            if not _is_text(getattr(row, name)):
                yield f"its {name} {getattr(row, name)[:60]!r} is no valid Unicode"
        if row.part < 0:
            yield f"its part is {row.part}, parts count from 0"
        whole = row.part == 0 and row.num_tokens < PART_TOKENS  # else later parts may hold more of the prompt
        if row.prompt_tokens is not None and (row.prompt_tokens < 0 or (whole and row.prompt_tokens > row.num_tokens)):
            yield f"its prompt_tokens is {row.prompt_tokens}, it has {row.num_tokens} tokens"

    def _tokens(self, row: SequenceRouting) -> Iterator[str]:
        ids, vocab_size = row.token_ids, self.header.vocab_size
        if ids is None:
            return
        if len(ids) != row.num_tokens:
            yield f"it lists {len(ids)} token ids and experts for {row.num_tokens} tokens"
        elif len(ids) and (ids.min() < 0 or (vocab_size is not None and ids.max() >= vocab_size)):
            legal = "0 or more" if vocab_size is None else f"0..{vocab_size - 1}"
            yield f"its token ids run from {ids.min()} to {ids.max()}, legal is {legal}"

    def _weights(self, row: SequenceRouting) -> Iterator[str]:
        kind, weights = self.header.weights, row.weights
        if weights is None:
            if kind not in ("", "none"):
                yield f"it has no weights, the header declares {kind!r}"
            return
        if kind == "none":
            yield "it has weights, the header declares none"
        if weights.shape != row.experts.shape:
            yield f"its weights are {weights.shape}, its experts {row.experts.shape}"
            return
        if not weights.size:
            return
        values_WT = np.ascontiguousarray(weights.T).astype(np.float32)
        least, most = values_WT.min(), values_WT.max()
        if not (isfinite(least) and isfinite(most)):  # min and max of what holds a NaN are NaN
            yield "its weights are not all finite"
        elif kind in ("unit", "normalized") and not -1e-3 <= least <= most <= 1.001:
            yield f"its weights run from {least:.4g} to {most:.4g}, the header declares {kind!r} (0..1)"
        elif kind == "normalized":
            yield from self._sums(row, values_WT)

    def _sums(self, row: SequenceRouting, values_WT: np.ndarray) -> Iterator[str]:
        """Hold the weights of each token and MoE layer to the sum 1.

        Adding with the tokens side by side takes 3 microseconds for 128 tokens of 6 layers, top-4; reduceat takes 11.
        """
        parts = [
            values_WT[start : start + num_layers * top_k].reshape(num_layers, top_k, row.num_tokens).sum(axis=1)
            for num_layers, top_k, start in self.runs[row.stack]
        ]
        sums_LT = parts[0] if len(parts) == 1 else np.concatenate(parts)
        wrong_TL = (np.abs(sums_LT - 1) > WEIGHT_SLACK).T
        if not wrong_TL.any():
            return
        if row.experts.min() < 0:  # dropped experts take their weight along
            wrong_TL &= np.minimum.reduceat(row.experts, self.columns[row.stack].bounds[:-1], axis=1) >= 0
        if wrong_TL.any():
            token, layer = np.argwhere(wrong_TL)[0]
            yield (
                f"its weights sum to {sums_LT[layer, token]:.4g} at token {token}, MoE layer "
                f"{self.columns[row.stack].layers[layer]}, the header declares 'normalized'"
            )

    def _experts(self, row: SequenceRouting) -> Iterator[str]:
        experts, columns = row.experts, self.columns[row.stack]
        most = experts.max()
        if experts.min() < -1 or most >= self.least_limit[row.stack]:
            out_of_range = columns.out_of_range(experts)
            if out_of_range:
                yield out_of_range
        elif most == -1:
            yield "all its experts are -1, nothing was recorded"
        layer, twice_T = self._first_repeat(row)
        if layer is not None:
            token, start, stop = int(np.argmax(twice_T)), columns.bounds[layer], columns.bounds[layer + 1]
            yield (
                f"experts {experts[token, start:stop].tolist()} at token {token}, MoE layer {columns.layers[layer]}, "
                f"are not distinct ({int(twice_T.sum())} such tokens)"
            )

    def _first_repeat(self, row: SequenceRouting) -> tuple[int | None, np.ndarray]:
        """Find the first layer of the row's stack in which a token has an expert twice, and the tokens [T] that do.

        Comparing each choice with those behind it takes 15 microseconds for 128 tokens of 6 layers, top-4; sorting 90.
        """
        ids_WT, first = np.ascontiguousarray(row.experts.T), 0
        for num_layers, top_k, start in self.runs[row.stack]:
            ids_LKT = ids_WT[start : start + num_layers * top_k].reshape(num_layers, top_k, row.num_tokens)
            twice_LT = np.zeros((num_layers, row.num_tokens), bool)
            for distance in range(1, top_k):
                ahead = ids_LKT[:, distance:]
                same = ids_LKT[:, :-distance] == ahead
                if same.any():
                    twice_LT |= (same & (ahead >= 0)).any(axis=1)
            if twice_LT.any():
                layer = int(np.argmax(twice_LT.any(axis=1)))
                return first + layer, twice_LT[layer]
            first += num_layers
        return None, np.zeros(row.num_tokens, bool)

    def _hidden(self, row: SequenceRouting) -> Iterator[str]:
        hidden, wanted = row.hidden, (row.num_tokens, self.columns[row.stack].hidden_width)
        if (hidden is None) == bool(self.header.hidden):
            yield (
                f"it has {'no ' if hidden is None else ''}hidden states, the header declares "
                f"{self.header.hidden or 'none'}"
            )
        elif hidden is not None and hidden.shape != wanted:
            yield f"its hidden states are {hidden.shape}, expected {wanted}"
        elif hidden is not None and not np.isfinite(hidden).all():
            token = int(np.argwhere(~np.isfinite(hidden))[0][0])
            yield f"its hidden states are infinite or no numbers at token {token}; float16 ends at 65504"

    def _scores(self, row: SequenceRouting) -> Iterator[str]:
        """Hold the ids to the scores that they were chosen from; among equal scores any may be chosen."""
        scores, columns, kind = row.scores, self.columns[row.stack], self.header.scores
        if scores is None or not kind:
            if scores is None and kind:
                yield f"it has no scores, the header declares {kind!r}"
            elif scores is not None:
                yield "it has scores, the header declares none"
            return
        if scores.shape != (row.num_tokens, columns.score_width):
            yield f"its scores are {scores.shape}, expected {(row.num_tokens, columns.score_width)}"
            return
        if np.isnan(scores).any():
            yield f"its scores are no numbers at token {int(np.argwhere(np.isnan(scores))[0][0])}"
            return
        spans = zip(columns.layers, pairwise(columns.bounds), pairwise(columns.score_bounds), strict=True)
        for layer, (start, stop), (first, last) in spans:
            ids_TK, scores_TE = row.experts[:, start:stop], scores[:, first:last]
            place = scores_TE.shape[1] - ids_TK.shape[1]
            least_T = np.partition(scores_TE, place, axis=1)[:, place]  # the smallest score among the k largest
            chosen_TK = np.take_along_axis(scores_TE, np.maximum(ids_TK, 0).astype(np.intp), axis=1)
            wrong = ((chosen_TK < least_T[:, None]) & (ids_TK >= 0)).any(axis=1)
            if wrong.any():
                token = int(np.argmax(wrong))
                best = np.argsort(-scores_TE[token], kind="stable")[: ids_TK.shape[1]]
                yield (
                    f"experts {ids_TK[token].tolist()} at token {token}, MoE layer {layer}, are not those with the "
                    f"largest scores, {best.tolist()} ({int(wrong.sum())} such tokens)"
                )
                return


def _is_text(value: str | None) -> bool:
    """Say whether a name can be stored: JSON and file names may hold halves of surrogate pairs."""
    try:
        (value or "").encode()
    except UnicodeEncodeError:
        return False
    return True
