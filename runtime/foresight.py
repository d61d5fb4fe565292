"""Foresight: the forecasts that a predictor makes of a recorded trace, forward by forward, as it makes them in service.

A forward of the token horizon gets what was predicted of its first token from the routing before it: of a prompt's
other tokens nothing is known before it starts, since their routing is decided in it. One of the batch horizon gets the
union of its tokens. Streams: a few sequences advance together, and no more of their scores are kept at a time than
those. Knows rows and predictors; no caches.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import cast

from ..collect.errors import SettingError
from ..collect.topology import MoeTopology
from ..collect.trace import SequenceRouting
from ..predictors.base import Predictor, PredictorSpec, TokenPredictor
from ..predictors.rows import fingerprint
from ..predictors.scoring import Scores, scores_of
from .events import Reading, forwards_of
from .forecast import FlatMap, Forecast, union

TOGETHER = 32  # sequences that advance together, for speed
CHUNK_CELLS = 1 << 23  # scores of one kind held at a time, 32 MiB, unless one sequence alone has more


def check_foresight(spec: PredictorSpec, how: Reading) -> None:
    """Refuse a reading of traces that a predictor cannot foresee.

    Raises:
        SettingError: if it predicts whole batches and is read token by token, or the other way round.
    """
    if spec.horizon == "batch":
        if how == "prefill" or (how == "recorded" and spec.stack == "encoder"):
            return
        legal, why = "prefill", "it predicts forwards whose tokens are all known, not one token after another"
    elif how == "prefill":
        legal, why = "decode or recorded", "it predicts one token after another, and a prompt's tokens are one forward"
    else:
        return
    raise SettingError(
        f"A predictor of the {spec.horizon} horizon is replayed as {legal}, got {how}: {why}; read the trace as "
        f"{legal}, or give another predictor."
    )


class Unseen:
    """Iterate once over the sequences that training has not seen, each with all of its rows.

    Args:
        rows: whole sequences (`join_parts`), the rows of each next to each other.
        seen: fingerprints of rows of the spec's stack (`Bundle.training_sequences`).
    """

    def __init__(self, rows: Iterable[SequenceRouting], spec: PredictorSpec, seen: set[int]) -> None:
        self.left_out = 0  # sequences so far
        self._rows, self._spec, self._seen = rows, spec, seen

    def __iter__(self) -> Iterator[SequenceRouting]:
        pending: list[SequenceRouting] = []
        for row in self._rows:
            if pending and (row.sequence != pending[0].sequence or row.stack in {other.stack for other in pending}):
                yield from self._kept(pending)
                pending = []
            pending.append(row)
        yield from self._kept(pending)

    def _kept(self, rows: list[SequenceRouting]) -> list[SequenceRouting]:
        known = any(row.stack == self._spec.stack and fingerprint(row) in self._seen for row in rows)
        self.left_out += known
        return [] if known else rows


def forecasts_of(
    predictor: Predictor, rows: Iterable[SequenceRouting], topology: MoeTopology, how: Reading
) -> Iterator[Forecast]:
    """Give the forecasts of a replay, in the order of its forwards; `step` numbers them as `Events.steps` does.

    Args:
        rows: whole sequences (`join_parts`), the same as the events are made of. Those of stacks that the predictor
            does not serve get no forecast.

    Raises:
        SettingError: as `check_foresight`.
        BundleError: if a score is nan or infinite.
    """
    check_foresight(predictor.spec, how)
    flat_map, horizon = FlatMap(predictor.spec, topology), predictor.spec.horizon
    if horizon == "layer":
        predictor = _TokenByToken(cast(TokenPredictor, predictor))
    step = 0
    for chunk in _chunks(rows, predictor.spec):
        served = [row for row in chunk if row.stack == predictor.spec.stack]
        scores = {id(item.row): item for item in scores_of(predictor, served, batch=TOGETHER)}
        for row in chunk:
            said = scores.pop(id(row), None)
            for part in forwards_of([row], how):
                if said is not None:
                    yield from _forecasts(said, part.start, len(part.experts), part.together, step, flat_map)
                step += part.num_forwards


class _TokenByToken:
    """A predictor of the layer horizon, asked before each token alone, as the engine asks it."""

    def __init__(self, predictor: TokenPredictor) -> None:
        self.spec = replace(predictor.spec, horizon="token")
        self.start, self.step = predictor.start, predictor.step


def _forecasts(
    said: Scores, start: int, count: int, together: bool, step: int, flat_map: FlatMap
) -> Iterator[Forecast]:
    """Give the forecast of one forward of several tokens, or of each of several tokens."""
    (routing,) = said.by_horizon.values()
    if together and "batch" in said.by_horizon:
        yield Forecast(step, flat_map.flat(union(routing[start : start + count], 1)))
        return
    stop = start + (1 if together else count)
    demand = flat_map.flat(routing[start:stop])
    reuse = None if said.reuse is None else flat_map.flat(said.reuse[start:stop])
    for index in range(len(demand)):
        yield Forecast(step + index, demand[index], None if reuse is None else reuse[index])


def _chunks(rows: Iterable[SequenceRouting], spec: PredictorSpec) -> Iterator[Sequence[SequenceRouting]]:
    """Cut rows into runs of few sequences, whose scores fit the memory."""
    cells = spec.shape[0] * spec.shape[1]
    chunk: list[SequenceRouting] = []
    longest = 0
    for row in rows:
        longest = max(longest, row.num_tokens)
        if chunk and (len(chunk) == TOGETHER or (len(chunk) + 1) * longest * cells > CHUNK_CELLS):
            yield chunk
            chunk, longest = [], row.num_tokens
        chunk.append(row)
    if chunk:
        yield chunk
