"""Decayed frequencies of past routing as features: how often each (layer, expert) was used lately, at several decays.

Knows many-hot routing and popularity; knows nothing of tokens or networks.
"""

# B batch, T tokens, L MoE layers, E experts, R decay rates

from __future__ import annotations

import torch
from torch import Tensor, nn

FLOOR = 0.02  # added to frequencies before the logarithm: one use in 50 tokens


class History(nn.Module):
    """Follow f_t = decay f_{t-1} + (1 - decay) used_{t-1}, from popularity on, for several decays.

    Features are the previous routing itself and the logarithm of each frequency over popularity. A layer that the
    previous token did not route keeps its frequencies.
    """

    def __init__(self, shape: tuple[int, int], decays: tuple[float, ...]) -> None:
        super().__init__()
        self.num_features = len(decays) + 1
        self.popularity_LE: Tensor
        self.decays_R: Tensor
        self.register_buffer("popularity_LE", torch.zeros(shape))
        self.register_buffer("decays_R", torch.tensor(decays, dtype=torch.float32))

    def start(self, batch: int) -> Tensor:
        """Give the frequencies [B, R, L, E] before the first token."""
        return self.popularity_LE.expand(batch, len(self.decays_R), -1, -1).clone()

    @torch.no_grad()  # inputs only: nothing before the frequencies learns
    def run(self, previous_BTLE: Tensor, start_BRLE: Tensor) -> tuple[Tensor, Tensor]:
        """Give the features [B, T, R + 1, L, E] of a sequence and the frequencies after its last token."""
        frequency_TBRLE = decayed(previous_BTLE, self._keep(previous_BTLE), start_BRLE)
        return self._features(previous_BTLE, frequency_TBRLE.transpose(0, 1)), frequency_TBRLE[-1]

    def step(self, previous_BLE: Tensor, frequency_BRLE: Tensor) -> tuple[Tensor, Tensor]:
        """Give the features [B, R + 1, L, E] of one token and the next frequencies."""
        keep = self._keep(previous_BLE)
        frequency_BRLE = frequency_BRLE * keep + previous_BLE[:, None] * (1 - keep)
        return self._features(previous_BLE, frequency_BRLE), frequency_BRLE

    @staticmethod
    def weigh(features: Tensor, weight_RLE: Tensor) -> Tensor:
        """Sum features [..., R + 1, L, E] up by weights of their own for each (layer, expert)."""
        return (features * weight_RLE).sum(-3)

    def _keep(self, previous: Tensor) -> Tensor:
        """Give the factor [..., R, L, 1] by which frequencies decay: 1 where there was no previous routing."""
        present = previous.amax(-1, keepdim=True).unsqueeze(-3)
        return 1 - (1 - self.decays_R[:, None, None]) * present

    def _features(self, previous: Tensor, frequency: Tensor) -> Tensor:
        logs = torch.log((frequency + FLOOR) / (self.popularity_LE + FLOOR))
        return torch.cat([previous.unsqueeze(-3), logs], dim=-3)


def decayed(previous_BTLE: Tensor, keep_BTRL1: Tensor, start_BRLE: Tensor) -> Tensor:
    """Run f_t = keep_t f_{t-1} + (1 - keep_t) previous_t and give all f [T, B, R, L, E]."""
    out = start_BRLE.new_empty(previous_BTLE.shape[1], *start_BRLE.shape)
    frequency = start_BRLE
    steps = zip(previous_BTLE.unbind(1), keep_BTRL1.unbind(1), out.unbind(), strict=True)
    for previous_BLE, keep_BRL1, next_BRLE in steps:
        frequency = torch.lerp(previous_BLE[:, None], frequency, keep_BRL1, out=next_BRLE)
    return out
