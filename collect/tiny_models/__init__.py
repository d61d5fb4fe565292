"""Tiny random models and a tokenizer for tests and tries, made in code without a download. Knows no traces or stores.

    model = tiny_models.build("qwen3_moe")                        # 2 MoE layers x 8 experts, top-3, in eval mode
    model = tiny_models.build("switch_transformers", expert_capacity=2)
    tokenizer = tiny_models.tokenizer()                           # a token per byte, 260 ids: in every vocabulary

Top-k is 3 where the family allows it: with two experts a + b = b + a hides a wrong order of summation.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForTokenClassification,
    PreTrainedModel,
)

from ..errors import SettingError
from . import hybrid, special, text, vision_language
from .sizes import VOCAB_SIZE, tiny_config
from .tokenizer import tokenizer

__all__ = ["FAMILIES", "FORMS", "VOCAB_SIZE", "build", "config_type", "tokenizer"]

FAMILIES: dict[str, dict[str, Any]] = {
    **text.FAMILIES,
    **hybrid.FAMILIES,
    **vision_language.FAMILIES,
    **special.FAMILIES,
}
"""By the name of a family's folder in transformers: values of its config in place of the tiny sizes."""

FORMS = (
    "qwen3_moe",  # gate and up side by side
    "gpt_oss",  # transposed, interleaved, with biases
    "nemotron_h",  # no gate, a width of its own, in a hybrid
    "muse_spark",  # a norm after each expert
    "mixtral",  # per expert on disk
    "deepseek_v3",  # dense blocks between
    "gemma4",  # inside of a model that also sees
    "ernie4_5_vl_moe",  # experts of its own for images
    "inkling2_loop",  # called several times
    "zaya",  # tokens may skip
    *special.FAMILIES,
)
"""One family of each form of experts: enough for tests that do not ask for every family."""

CONFIG_TYPES = {"inkling": "inkling_mm_model", "nllb_moe": "nllb-moe"}
TEXT_ONLY = {"llama4"}  # its image-and-text class asks text outputs for image outputs and cannot run
FACTORIES: tuple[Any, ...] = (
    AutoModelForMultimodalLM,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForTokenClassification,
)


def config_type(name: str) -> str:
    """Give a family's `model_type` in config.json, which differs from its folder's name for two of them."""
    return CONFIG_TYPES.get(name, name)


def build(name: str, *, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """Build a tiny random float32 model of a family in eval mode; equal arguments give equal weights.

    Args:
        name: a key of `FAMILIES`.
        seed: of the weights; the global random state is left as it was.
        overrides: config values in place of the tiny ones, as `num_experts=16` or `expert_capacity=2`; those of a
            sub-config as a dict: `text_config={"num_experts": 16}`.

    Raises:
        SettingError: if the name is no key of `FAMILIES`.
    """
    if name not in FAMILIES:
        raise SettingError(f"name must be one of {', '.join(sorted(FAMILIES))}, got {name!r}.")
    values = dict(FAMILIES[name])
    for key, value in overrides.items():
        both = isinstance(value, dict) and isinstance(values.get(key), dict)
        values[key] = {**values[key], **value} if both else value
    config = tiny_config(CONFIG_MAPPING[config_type(name)], values)
    factories = [AutoModelForCausalLM] if name in TEXT_ONLY else FACTORIES
    factory = next(item for item in factories if type(config) in item._model_mapping)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = factory.from_config(config).eval()
        _fill(model)
        return model


def _fill(model: PreTrainedModel) -> None:
    """Give what is all zero when fresh values that tell tokens apart: routers, and tables of experts by token id."""
    for parameter in model.parameters():
        if parameter.dim() == 2 and not parameter.any():
            parameter.data.normal_(std=0.1)
    for name, table in model.named_buffers():
        if name.endswith(".tid2eid"):
            table.copy_(torch.rand(len(table), model.config.n_routed_experts).argsort(-1)[:, : table.shape[1]])
