"""Embedding of token ids for predictors: a row per id that was seen or whose text is known, one for every other id."""

# S ids seen in training, D width, L MoE layers, E experts

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from .rows import RoutingStatistics
from .token_texts import embed_texts

BY_TEXT = 0.8  # of the ids that are forgotten in training and whose texts are known
SMOOTHING = 4.0  # tokens' worth of popularity mixed into a token's own counts; 2 to 8 differ by < .002 recall


class TokenEmbedding(nn.Module):
    """Embed token ids; ids that are not known, negative ids and ids beyond the vocabulary share the last row.

    Known are ids that training saw, and others whose texts are known: `spelt` holds what follows from the texts alone.
    """

    def __init__(self, vocab_size: int, known_ids: np.ndarray, width: int) -> None:
        super().__init__()
        known = torch.as_tensor(known_ids, dtype=torch.int64)
        rows = torch.full((vocab_size + 1,), len(known), dtype=torch.int64)
        rows[known] = torch.arange(len(known))
        self.vocab_size, self.unknown = vocab_size, len(known)
        self.rows: Tensor
        self.spelt: Tensor
        self.register_buffer("rows", rows)
        self.table = nn.Embedding(len(known) + 1, width)
        self.register_buffer("spelt", torch.zeros(len(known) + 1, width))
        nn.init.normal_(self.table.weight, std=0.02)

    @torch.no_grad()
    def start(self, statistics: RoutingStatistics, embedding_SD: Tensor) -> None:
        """Start at the embeddings of the ids that were seen, and at what their texts say of the others."""
        self.table.weight.zero_()
        self.spelt.zero_()
        seen = self.rows[torch.as_tensor(statistics.token_ids)]
        if statistics.texts is not None:
            found = embed_texts(statistics.texts, statistics.token_ids, embedding_SD.numpy(), statistics.counts_S)
            written = self.rows[: len(statistics.texts)]
            self.spelt[written] = torch.from_numpy(found.of_all[: len(written)])
            self.table.weight.copy_(self.spelt)
            self.spelt[seen] = torch.from_numpy(found.of_seen)
            self.spelt[self.unknown] = self.table.weight[self.unknown] = 0
        self.table.weight[seen] = embedding_SD

    def forward(self, ids: Tensor, forget: float = 0.0) -> Tensor:
        """Embed ids [...] to [..., D]; a share `forget` of them is taken for ids that were never seen.

        Most of those are embedded by their texts, the others, and all where texts are not known, by the unknown row.
        """
        known = (ids >= 0) & (ids < self.vocab_size)
        rows = self.rows[torch.where(known, ids, self.vocab_size)]
        if forget <= 0:
            return self.table(rows)
        draws = torch.rand(rows.shape, device=rows.device)
        spelt = self.spelt[rows]
        by_text = (draws < BY_TEXT * forget) & spelt.any(-1)
        embedded = self.table(rows.masked_fill(draws < forget, self.unknown))
        return torch.where(by_text[..., None], spelt, embedded)


@torch.no_grad()
def factorise(statistics: RoutingStatistics, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Factorise the token table: bias [L*E], embedding [S, D] and skip [L*E, D].

    bias + embedding @ skip.T approximates each token's smoothed log-odds of using each expert, best where tokens are
    frequent; an embedding of 0 means popularity. Columns beyond the rank are 0 in the skip.
    """
    popularity = torch.as_tensor(statistics.popularity_LE, dtype=torch.float32).flatten().clamp(1e-4, 1 - 1e-4)
    counts = torch.as_tensor(statistics.counts_S, dtype=torch.float32)[:, None]
    uses = torch.as_tensor(statistics.uses_SLE, dtype=torch.float32).flatten(1)
    smoothed = ((uses + SMOOTHING * popularity) / (counts + SMOOTHING)).clamp(1e-4, 1 - 1e-4)
    bias = torch.logit(popularity)
    deviations = torch.logit(smoothed) - bias
    rank = min(width, *deviations.shape)
    embedding, skip = torch.zeros(len(counts), width), torch.zeros(len(bias), width)
    if rank > 0:
        weighted = deviations * counts.sqrt()
        _, _, axes = torch.svd_lowrank(weighted, q=min(rank + 8, *deviations.shape), niter=2)
        projected = deviations @ axes[:, :rank]
        scale = projected.std(0, correction=0).clamp(min=1e-3)
        embedding[:, :rank], skip[:, :rank] = projected / scale, axes[:, :rank] * scale
    return bias, embedding, skip
