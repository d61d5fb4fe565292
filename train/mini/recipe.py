"""Settings of the mini recipe. The same classes feed the command line and the YAML files in configs/mini/."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from jsonargparse import ArgumentParser, set_parsing_settings

from ...collect.errors import SettingError
from .tokenizer import Kind

Precision = Literal["float32", "bfloat16"]
Optimizer = Literal["adamw", "adafactor"]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Size of a mini model."""

    vocab_size: int = 4096
    """Tokens of the byte-level BPE vocabulary, special tokens included."""
    hidden_size: int = 128
    """Width of the residual stream."""
    expert_size: int = 64
    """Inner width of one expert."""
    num_layers: int = 6
    """Blocks of the causal stack, or of each of the encoder and the decoder."""
    num_experts: int = 32
    """Routed experts of each MoE layer."""
    top_k: int = 4
    """Experts that each token chooses; a switch model has 1."""
    num_heads: int = 4
    """Attention heads."""
    num_kv_heads: int = 2
    """Key and value heads; a switch model has as many as num_heads."""
    max_length: int = 1024
    """Longest sequence in tokens."""
    expert_capacity: int = 8
    """Tokens of one sequence that one expert takes, switch only; later ones pass by the expert."""


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Length and pace of the training."""

    num_steps: int = 4000
    """Optimizer steps, fewer where max_minutes ends first."""
    batch_size: int = 8
    """Sequences of one step."""
    sequence_tokens: int = 512
    """Tokens of one training sequence (causal), or the most of one encoder input (switch)."""
    optimizer: Optimizer = "adamw"
    """adamw, or adafactor, whose steps are relative to the size of each matrix: T5-like attention needs that."""
    learning_rate: float = 2e-3
    """Highest learning rate, after the warm-up."""
    warmup_steps: int = 100
    """Steps of linear warm-up; a cosine falls to a twentieth afterwards."""
    weight_decay: float = 0.1
    """Decay of matrices; vectors have none."""
    balance: float = 0.01
    """Coefficient of the load-balancing loss."""
    z_loss: float = 0.001
    """Coefficient of the router z-loss, switch only."""
    dropout: float = 0.1
    """Dropout of a switch model, its experts included."""
    jitter: float = 0.01
    """Width of the multiplicative noise on router inputs, switch only."""
    evaluate_steps: int = 250
    """Steps from one held-out measurement to the next."""
    checkpoint_steps: int = 250
    """Steps from one checkpoint to the next; a run that was killed goes on from the last."""
    precision: Precision = "float32"
    """Arithmetic of the forward pass: float32, or autocast to bfloat16."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that one run needs."""

    kind: Kind
    """causal: Qwen3-MoE language model. switch: Switch Transformers text-to-label model."""
    output: Path
    """Folder for the model, its tokenizer and its card."""
    checkpoints: Path
    """Folder for checkpoints; delete it to start from nothing."""
    data: Path | None = None
    """Folder with the local text; FOREGATE_DATA where not given."""
    seed: int = 17
    """Seed of weights, order and masks."""
    threads: int = 1
    """Threads of torch."""
    max_minutes: float = 35.0
    """Training time over all resumed parts; the learning rate has fallen to its end by then."""
    max_documents: int | None = None
    """Cut each source of text to so many documents, for a smoke run."""
    shape: Shape = field(default_factory=Shape)
    """Size of the model."""
    schedule: Schedule = field(default_factory=Schedule)
    """Length and pace of the training."""

    def __post_init__(self) -> None:
        """Refuse numbers that cannot be trained with."""
        if self.kind not in get_args(Kind):
            raise SettingError(f"kind must be one of {', '.join(get_args(Kind))}, got {self.kind!r}.")
        if self.kind == "switch" and self.shape.top_k != 1:
            raise SettingError(f"shape.top_k must be 1 for a switch model, got {self.shape.top_k}.")
        positive = {
            "threads": self.threads,
            "max_minutes": self.max_minutes,
            "schedule.num_steps": self.schedule.num_steps,
            "schedule.batch_size": self.schedule.batch_size,
            "schedule.evaluate_steps": self.schedule.evaluate_steps,
            "schedule.checkpoint_steps": self.schedule.checkpoint_steps,
        }
        for name, value in positive.items():
            if value <= 0:
                raise SettingError(f"{name} must be positive, got {value}.")


def recipe_parser() -> ArgumentParser:
    """Build the parser of `python -m foregate.train.mini`; unknown keys are refused."""
    set_parsing_settings(docstring_parse_attribute_docstrings=True)
    parser = ArgumentParser(prog="python -m foregate.train.mini", description="Train a mini model.")
    parser.add_argument("--config", action="config", help="YAML file with the fields below.")
    parser.add_class_arguments(Recipe)
    return parser


def read_recipe(args: list[str] | None = None) -> Recipe:
    """Parse a command line into a recipe; `--max-minutes` and `--max_minutes` are the same flag."""
    parser = recipe_parser()
    spelled = [_underscored(arg) for arg in (sys.argv[1:] if args is None else args)]
    values = vars(parser.instantiate(parser.parse_args(spelled)))
    return Recipe(**{name: value for name, value in values.items() if name != "config"})


def _underscored(arg: str) -> str:
    flag, equals, value = arg.partition("=")
    return "--" + flag[2:].replace("-", "_") + equals + value if flag.startswith("--") else arg
