"""Text-to-text tasks of the switch mini model. Turns text into padded batches; knows no models.

Worked example: `sst2 sentence: a fine film` -> ` positive: a fine film`. The label comes first and decides the
accuracy; the echo of the input behind it gives the decoder ordinary words to route. Besides SST-2 and MRPC there is
a task whose targets come free: masked spans, as in T5.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedTokenizerFast

from .text import Text
from .tokenizer import END, PAD, SENTINELS

SST2_LABELS = [" negative", " positive"]
MRPC_LABELS = [" not_equivalent", " equivalent"]
LABEL_LINES = [f"sst2 sentence:{label}" for label in SST2_LABELS] + [
    f"mrpc sentence1: sentence2:{label}" for label in MRPC_LABELS
]
MIX = {"sst2": 0.8, "mrpc": 0.1, "spans": 0.1}  # pairs are long: more of them would halve the phrases per minute
ECHO_TOKENS = 8
ECHO_WEIGHT = 0.02  # of a token behind the label, which weighs 1: the echo must not drown the task
SPAN_WEIGHT = 0.05
MASKED = 0.15  # share of tokens in masked spans, T5 section 3.1.4
SPAN_TOKENS = 3
WORD_DROPOUT = 0.1  # of the tokens of a labelled input: 67 k phrases are few for a model without pre-training
POOL = 8  # batches drawn at once and sorted by length, so that little of them is padding


@dataclass(frozen=True, slots=True)
class Example:
    """Hold token ids of one example."""

    source: list[int]
    target: list[int]
    weights: list[float]


@dataclass(frozen=True, slots=True)
class Batch:
    """Hold padded tensors: ids_BS and mask_BS of the encoder, labels_BS (-100 padded) and weights_BS of the decoder."""

    ids: torch.Tensor
    mask: torch.Tensor
    labels: torch.Tensor
    weights: torch.Tensor


class Tasks:
    """Draw training batches by step, and list labelled examples."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, text: Text, *, max_tokens: int, seed: int) -> None:
        self.tokenizer = tokenizer
        self.max_tokens = max_tokens
        self.seed = seed
        ids: dict[str, int] = tokenizer.get_vocab()
        self.pad, self.end = ids[PAD], ids[END]
        self.sentinels = [ids[sentinel] for sentinel in SENTINELS]
        self.labels = {task: self._encode(names) for task, names in (("sst2", SST2_LABELS), ("mrpc", MRPC_LABELS))}
        prefixes = ["sst2 sentence:", "mrpc sentence1:", " sentence2:", ":"]
        self.sst2_prefix, self.mrpc_prefix, self.second, self.colon = self._encode(prefixes)
        self.sst2 = self._encode([f" {phrase}" for phrase, _ in text.sst2])
        self.sst2_labels = [label for _, label in text.sst2]
        self.mrpc = list(
            zip(
                self._encode([f" {first}" for first, _, _ in text.mrpc]),
                self._encode([f" {second}" for _, second, _ in text.mrpc]),
                strict=True,
            )
        )
        self.mrpc_labels = [label for _, _, label in text.mrpc]
        documents = [
            f" {line}" for lines in text.documents.values() for document in lines for line in document.split("\n")
        ]
        self.lines = [tokens for tokens in self._encode(documents) if len(tokens) >= 8]
        # long phrases are rarer in training than among the dev sentences: draw by the root of the length
        chance = np.sqrt([len(tokens) for tokens in self.sst2])
        self.sst2_chance = np.cumsum(chance / chance.sum())

    def _encode(self, lines: list[str]) -> list[list[int]]:
        return self.tokenizer(lines, add_special_tokens=False, verbose=False)["input_ids"]

    def batch(self, step: int, size: int) -> Batch:
        """Draw the training batch of one step."""
        pool, place = divmod(step, POOL)
        rng = np.random.default_rng((self.seed, pool))
        names = rng.choice(list(MIX), size=size * POOL, p=list(MIX.values()))
        draw = {"sst2": self._sst2, "mrpc": self._mrpc, "spans": self._spans}
        examples = sorted((draw[name](rng) for name in names), key=lambda example: len(example.source))
        chunk = int(rng.permutation(POOL)[place])
        return self.collate(examples[chunk * size : (chunk + 1) * size])

    def labelled(self, task: str) -> list[tuple[Example, int]]:
        """List all labelled examples of sst2 or mrpc as they are, without noise, with their labels."""
        if task == "sst2":
            return [
                (self.sst2_example(tokens, label), label)
                for tokens, label in zip(self.sst2, self.sst2_labels, strict=True)
            ]
        return [
            (self.mrpc_example(*pair, label), label) for pair, label in zip(self.mrpc, self.mrpc_labels, strict=True)
        ]

    def sst2_example(self, tokens: list[int], label: int) -> Example:
        """Build one SST-2 example."""
        return self._example("sst2", [*self.sst2_prefix, *tokens], tokens, label)

    def mrpc_example(self, first: list[int], second: list[int], label: int) -> Example:
        """Build one MRPC example, each sentence cut to half of the room."""
        half = self.max_tokens // 2 - 6
        return self._example("mrpc", [*self.mrpc_prefix, *first[:half], *self.second, *second[:half]], first, label)

    def collate(self, examples: list[Example]) -> Batch:
        """Pad examples to tensors."""
        width, depth = max(len(e.source) for e in examples), max(len(e.target) for e in examples)
        ids = np.full((len(examples), width), self.pad)
        labels = np.full((len(examples), depth), -100)
        weights = np.zeros((len(examples), depth), dtype=np.float32)
        for row, example in enumerate(examples):
            ids[row, : len(example.source)] = example.source
            labels[row, : len(example.target)] = example.target
            weights[row, : len(example.target)] = example.weights
        ids_BS = torch.from_numpy(ids)
        return Batch(ids_BS, (ids_BS != self.pad).long(), torch.from_numpy(labels), torch.from_numpy(weights))

    def _example(self, task: str, source: list[int], echo: list[int], label: int) -> Example:
        answer = self.labels[task][label]
        rest = [*self.colon, *echo[:ECHO_TOKENS], self.end]
        weights = [1.0 / len(answer)] * len(answer) + [ECHO_WEIGHT] * len(rest)
        return Example([*source[: self.max_tokens - 1], self.end], [*answer, *rest], weights)

    def _thin(self, rng: np.random.Generator, tokens: list[int]) -> list[int]:
        kept = [token for token, keep in zip(tokens, rng.random(len(tokens)) > WORD_DROPOUT, strict=True) if keep]
        return kept or tokens

    def _sst2(self, rng: np.random.Generator) -> Example:
        index = min(int(np.searchsorted(self.sst2_chance, rng.random())), len(self.sst2) - 1)
        return self.sst2_example(self._thin(rng, self.sst2[index]), self.sst2_labels[index])

    def _mrpc(self, rng: np.random.Generator) -> Example:
        index = int(rng.integers(len(self.mrpc)))
        first, second = self.mrpc[index][:: 1 if rng.random() < 0.5 else -1]
        return self.mrpc_example(self._thin(rng, first), self._thin(rng, second), self.mrpc_labels[index])

    def _spans(self, rng: np.random.Generator) -> Example:
        line = self.lines[int(rng.integers(len(self.lines)))]
        start = int(rng.integers(max(1, len(line) - self.max_tokens + 2)))
        return self.spans_example(line[start : start + self.max_tokens - 1], rng)

    def spans_example(self, tokens: list[int], rng: np.random.Generator) -> Example:
        """Mask spans of a line: the source has sentinels in their place, the target the sentinels with the spans."""
        count = max(1, min(len(self.sentinels), round(MASKED * len(tokens) / SPAN_TOKENS)))
        starts = np.sort(
            rng.choice(
                max(1, len(tokens) - SPAN_TOKENS), size=min(count, max(1, len(tokens) - SPAN_TOKENS)), replace=False
            )
        )
        source: list[int] = []
        target: list[int] = []
        place = 0
        for sentinel, start in zip(self.sentinels, starts, strict=False):
            if start < place:
                continue
            source += [*tokens[place:start], sentinel]
            place = int(start) + SPAN_TOKENS
            target += [sentinel, *tokens[int(start) : place]]
        return Example([*source, *tokens[place:], self.end], [*target, self.end], [SPAN_WEIGHT] * (len(target) + 1))
