"""Arms that generate from the same prompts in interleaved passes. Knows models and clocks; knows no stores or plots."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from ..clock import Clock, SystemClock


class Generation(NamedTuple):
    """What one prompt gave in one pass."""

    token_ids: tuple[int, ...]
    """New tokens."""
    first_s: float
    """Seconds to the first new token: prefill."""
    rest_s: float
    """Seconds for the others."""


@dataclass(kw_only=True)
class Arm:
    """One way to run the model."""

    model: Any
    """A transformers model; with `foregate` where its experts are offloaded."""
    passes: list[list[Generation]] = field(default_factory=list)
    """Per pass, one entry per prompt."""

    @property
    def seconds(self) -> float:
        """Seconds of all passes."""
        return sum(item.first_s + item.rest_s for done in self.passes for item in done)

    @property
    def tokens_per_s(self) -> list[float]:
        """New tokens per second, one value per pass."""
        return [
            sum(len(item.token_ids) for item in done) / sum(item.first_s + item.rest_s for item in done)
            for done in self.passes
        ]

    @property
    def ttft_s(self) -> float:
        """Median seconds to the first token."""
        return statistics.median(item.first_s for done in self.passes for item in done)

    @property
    def tpot_s(self) -> float:
        """Median seconds per further token."""
        return statistics.median(
            item.rest_s / (len(item.token_ids) - 1) for done in self.passes for item in done if len(item.token_ids) > 1
        )

    @property
    def texts(self) -> list[list[tuple[int, ...]]]:
        """New tokens of every prompt, per pass."""
        return [[item.token_ids for item in done] for done in self.passes]


class _Stopwatch:
    """A streamer that notes when the first new token comes."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.first: float | None = None
        self._prompt_seen = False

    def put(self, value: torch.Tensor) -> None:
        """Take tokens: first the prompt, then each new one."""
        if self._prompt_seen and self.first is None:
            self.first = self.clock.now()
        self._prompt_seen = True

    def end(self) -> None:
        """Take the end of the text."""


def generate(model: Any, prompt: torch.Tensor, new_tokens: int, clock: Clock, seed: int = 0) -> Generation:
    """Sample exactly `new_tokens` from one prompt [1, T] and time it; equal logits and seeds give equal tokens.

    Sampling, since greedy text of a small model soon repeats itself, and with it its experts.
    """
    torch.manual_seed(seed)
    watch = _Stopwatch(clock)
    start = clock.now()
    with torch.no_grad():
        out = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            do_sample=True,
            streamer=watch,
        )
    end = clock.now()
    first = watch.first if watch.first is not None else end
    return Generation(tuple(out[0, prompt.shape[1] :].tolist()), first - start, end - first)


def run_arms(
    arms: Mapping[str, Arm],
    prompts: Sequence[torch.Tensor],
    *,
    new_tokens: int,
    passes: int,
    seed: int = 0,
    between: Callable[[], None] = lambda: None,
    progress: Callable[[str, int], None] = lambda name, index: None,
    clock: Clock | None = None,
) -> None:
    """Run every arm over every prompt, pass by pass; each pass starts with another arm.

    Args:
        between: called before each pass, for instance to probe the link under the same conditions.
        progress: told the arm and the pass that begin.
    """
    clock = clock or SystemClock()
    names = list(arms)
    for index in range(passes):
        between()
        for name in names[index % len(names) :] + names[: index % len(names)]:
            progress(name, index)
            arm = arms[name]
            arm.passes.append(
                [generate(arm.model, prompt, new_tokens, clock, seed + i) for i, prompt in enumerate(prompts)]
            )
