"""How fast what learns: groups of parameters, and a learning rate that follows the share of the run that is over.

Knows the Lightning trainer's limits; knows no networks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Timer
from torch import nn

LEAST = 1e-3  # of the learning rate, so that the first steps learn something


def parameter_groups(named: Iterable[tuple[str, nn.Parameter]], rates: Mapping[str, float]) -> list[dict[str, Any]]:
    """Give AdamW's groups: lookups, matrices and vectors."""
    lookup, matrices, vectors = [], [], []
    for name, parameter in named:
        slow = "embedding" in name or "skip" in name  # started from counts, and prone to learn sequences by heart
        (lookup if slow else matrices if parameter.ndim == 2 else vectors).append(parameter)
    return [
        {"params": lookup, "lr": rates["learning_rate"] * rates["lookup_share"], "weight_decay": 0.0},
        {"params": matrices, "lr": rates["learning_rate"], "weight_decay": rates["weight_decay"]},
        {"params": vectors, "lr": rates["learning_rate"], "weight_decay": 0.0},
    ]


def progress(trainer: L.Trainer) -> float:
    """Give the share of the run that is over, by steps, epochs or time, whichever is furthest; equal on all ranks."""
    shares = [0.0]
    if trainer.max_steps and trainer.max_steps > 0:
        shares.append(trainer.global_step / trainer.max_steps)
    if trainer.max_epochs and trainer.max_epochs > 0:  # the number of batches is infinite until they are loaded
        shares.append(trainer.global_step / (trainer.max_epochs * max(1, trainer.num_training_batches)))
    for callback in trainer.callbacks:  # pyright: ignore[reportAttributeAccessIssue]
        remaining = callback.time_remaining() if isinstance(callback, Timer) else None
        if isinstance(callback, Timer) and remaining is not None:
            elapsed = callback.time_elapsed()
            shares.append(elapsed / max(elapsed + remaining, 1e-9))
    share = min(1.0, max(shares))
    if trainer.world_size == 1:
        return share
    # clocks differ between ranks, and other rates would let their weights drift apart
    furthest = torch.tensor(share, dtype=torch.float64, device=trainer.strategy.root_device)
    torch.distributed.all_reduce(furthest, op=torch.distributed.ReduceOp.MAX)
    return float(furthest)


def factor(done: float, rates: Mapping[str, float]) -> float:
    """Give the share of the learning rate at a share of the run: a rise, then a cosine down to `final_share`."""
    rising = min(1.0, done / rates["warmup_share"]) if rates["warmup_share"] else 1.0
    falling = 0.5 * (1 + math.cos(math.pi * done))
    return max(rising * (rates["final_share"] + (1 - rates["final_share"]) * falling), LEAST)


def renew_rates(checkpoint: dict[str, Any], old: Mapping[str, float], groups: list[dict[str, Any]]) -> None:
    """Let a checkpoint's optimizer and schedule go on with the rates of new groups instead of those it was made with.

    Nothing changes where they are equal, to the last bit.
    """
    before = parameter_groups([], old)
    for state in checkpoint["optimizer_states"]:
        for saved, was, group in zip(state["param_groups"], before, groups, strict=True):
            saved["lr"] *= group["lr"] / was["lr"] if was["lr"] else 1.0
            saved["initial_lr"], saved["weight_decay"] = group["lr"], group["weight_decay"]
    for state in checkpoint["lr_schedulers"]:
        state["base_lrs"] = [group["lr"] for group in groups]
