"""Training loop of the mini models: schedule, time limit, checkpoints. Knows nothing of text, routers or cards."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...collect.errors import SettingError
from .recipe import Recipe, Schedule

log = logging.getLogger(__name__)

FLOOR = 0.05  # the cosine ends at a twentieth: from there on the held-out curve is flat

Loss = Callable[[int], tuple[torch.Tensor, int]]
Point = dict[str, Any]


def pace(schedule: Schedule, step: int, minutes: float, max_minutes: float) -> float:
    """Return the factor on the learning rate; progress is that of steps or of time, whichever is further."""
    if step < schedule.warmup_steps:
        return (step + 1) / schedule.warmup_steps
    done = (step - schedule.warmup_steps) / max(1, schedule.num_steps - schedule.warmup_steps)
    progress = min(1.0, max(done, minutes / max_minutes))
    return FLOOR + (1 - FLOOR) * 0.5 * (1 + math.cos(math.pi * progress))


def optimizer_for(model: nn.Module, schedule: Schedule) -> torch.optim.Optimizer:
    """Decay matrices, leave vectors alone."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": schedule.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    if schedule.optimizer == "adafactor":
        return torch.optim.Adafactor(groups, lr=schedule.learning_rate, foreach=True)
    return torch.optim.AdamW(groups, lr=schedule.learning_rate, betas=(0.9, 0.98), fused=True)


class Loop:
    """Run optimizer steps until the steps or the minutes are spent; go on where a checkpoint stands."""

    def __init__(self, recipe: Recipe, model: nn.Module, loss: Loss, measure: Callable[[], Point]) -> None:
        self.recipe = recipe
        self.model = model
        self.loss = loss
        self.measure = measure
        self.optimizer = optimizer_for(model, recipe.schedule)
        self.step = 0
        self.tokens = 0
        self.minutes = 0.0
        self.curve: list[Point] = []

    @property
    def path(self) -> Path:
        """Where the checkpoint stands."""
        return self.recipe.checkpoints / "checkpoint.pt"

    def resume(self) -> bool:
        """Load the last checkpoint; tell whether there was one."""
        if not self.path.is_file():
            return False
        state = torch.load(self.path, weights_only=True)
        if state["settings"] != self.settings():
            raise SettingError(
                f"{self.path} holds a run with the settings {state['settings']}: resume it with these, or"
                " delete its folder to train anew."
            )
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.tokens, self.minutes = state["step"], state["tokens"], state["minutes"]
        self.curve = state["curve"]
        log.info("resumed at step %d after %.1f minutes", self.step, self.minutes)
        return True

    def settings(self) -> str:
        """Name what a checkpoint depends on: paths, threads and the time limit may change between its parts."""
        recipe = self.recipe
        return repr((recipe.kind, recipe.seed, recipe.max_documents, recipe.shape, recipe.schedule))

    def save(self) -> None:
        """Write the checkpoint beside the old one, then replace it: a kill in between loses nothing."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        names = ("step", "tokens", "minutes", "curve")
        state: dict[str, Any] = {
            "settings": self.settings(),
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }
        torch.save(state | {name: getattr(self, name) for name in names}, self.path.with_suffix(".part"))
        os.replace(self.path.with_suffix(".part"), self.path)

    def run(self) -> None:
        """Train to the end of the schedule or of the time."""
        schedule, limit = self.recipe.schedule, self.recipe.max_minutes
        if not self.curve:
            self.note()
        started = time.monotonic() - 60 * self.minutes
        self.model.train()
        while self.step < schedule.num_steps and self.minutes < limit:
            # seeded by step: a resumed run draws the dropout masks that an unbroken one would have drawn
            torch.manual_seed(self.recipe.seed * 1_000_003 + self.step)
            factor = pace(schedule, self.step, self.minutes, limit)
            for group in self.optimizer.param_groups:
                group["lr"] = factor * schedule.learning_rate
            with self.autocast():
                loss, tokens = self.loss(self.step)
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            self.step += 1
            self.tokens += tokens
            self.minutes = (time.monotonic() - started) / 60
            if self.step % schedule.evaluate_steps == 0:
                self.note()
            if self.step % schedule.checkpoint_steps == 0:
                self.save()
        if self.curve[-1]["step"] != self.step:
            self.note()
        self.save()

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Return the arithmetic of the forward pass."""
        if self.recipe.schedule.precision == "bfloat16":
            return torch.autocast("cpu", torch.bfloat16)
        return contextlib.nullcontext()

    def note(self) -> None:
        """Add one point to the held-out curve."""
        self.model.eval()
        with torch.inference_mode():
            point = self.measure()
        self.model.train()
        self.curve.append({"step": self.step, "tokens": self.tokens, "minutes": round(self.minutes, 2), **point})
        log.info("%s", self.curve[-1])
