"""Settings of a recording run. Knows what is legal; loads nothing, so that a command line is made from it at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from .errors import SettingError

Overflow = Literal["split", "cut"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectConfig:
    """Record which experts a model chooses for each token of a corpus."""

    model: str
    """Folder of a transformers model or of a packed store, or a name on the Hugging Face hub."""
    data: str
    """topics, glue/sst2, glue/mrpc, glue/rte, a text, .jsonl, .tsv or .csv file, or a data set of the hub."""
    out: str
    """Folder of the trace to write."""
    split: str = "train"
    """Split of a data set; local files and topics have none."""
    subset: str | None = None
    """Configuration of a hub data set."""
    text_column: str = "text"
    """Column with the text, of tables and hub data sets."""
    target_column: str | None = None
    """Column with the target text, for encoder-decoder models."""
    group_column: str | None = None
    """Column with what must not be split between training and test."""
    category_column: str | None = None
    """Column with the domain label."""
    max_sequences: int | None = None
    """Sequences of the trace; all of the corpus without it."""
    max_tokens: int = 512
    """Most tokens of a text's sequence, generated ones not counted."""
    overflow: Overflow = "split"
    """What becomes of longer texts: split into several sequences of one group, or cut off."""
    batch_size: int = 8
    """Sequences that run together."""
    generate: int = 0
    """Most tokens to generate after each text; 0 records the text alone."""
    temperature: float = 0.0
    """Of the generation: 0 takes the most likely token, above it tokens are drawn."""
    dtype: Dtype = "auto"
    """Arithmetic of the model: auto is the checkpoint's own."""
    device: str = "auto"
    """Where the model runs: auto is the first CUDA device, or the CPU."""
    seed: int = 0
    """Seed of drawn tokens."""
    resume: bool = False
    """Go on with the trace where it stopped."""
    shard_rows: int = 2048
    """Rows of a shard; a run that is killed loses at most the shard that it has open."""
    scores: bool = False
    """Store the router scores that the experts were chosen by."""
    hidden: bool = False
    """Store the hidden states that the routers saw, for next_gate: 2 bytes x MoE layers x hidden size a token, which is
    138 KB at 24 layers of 2880."""
    with_text: bool = False
    """Store the texts beside their token ids."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model."""

    def __post_init__(self) -> None:
        least_of = {"max_tokens": 1, "batch_size": 1, "generate": 0, "max_sequences": 1, "shard_rows": 1}
        for name, least in least_of.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise SettingError(f"{name} must be at least {least}, got {value}.")
        if self.temperature < 0:
            raise SettingError(f"temperature must be 0 or more, got {self.temperature}.")
        if self.temperature > 0 and not self.generate:
            raise SettingError(f"temperature is {self.temperature} and generate is 0; give --generate N with it.")
        for name, kind in (("overflow", Overflow), ("dtype", Dtype)):
            if getattr(self, name) not in get_args(kind):
                raise SettingError(f"{name} must be one of {', '.join(get_args(kind))}, got {getattr(self, name)!r}.")
