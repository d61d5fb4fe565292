"""Loading a model with its tokenizer, and the fingerprint of a tokenizer. Knows transformers; knows no traces."""

from __future__ import annotations

import hashlib
import json
import logging
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from .config import Dtype
from .errors import ModelError, SettingError

log = logging.getLogger(__name__)


def choose_device(name: str) -> torch.device:
    """Resolve "auto" to the first CUDA device or the CPU, and log which; other names are taken as they are.

    Raises:
        SettingError: if torch knows no such device or cannot use it.
    """
    if name == "auto":
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        log.info("device %s: %s", device, "CUDA is available" if device.type == "cuda" else "no CUDA device")
        return device
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise SettingError(f"device must be auto, cpu or one that torch can use, got {name!r}.") from error
    return device


def load_pretrained(
    name: str, *, dtype: Dtype = "auto", device: str = "cpu", trust_remote_code: bool = False
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a whole model, in eval mode, and its tokenizer from a folder or by its name on the hub.

    Args:
        name: folder, or name on the Hugging Face hub.
        dtype: of the weights; auto is the checkpoint's own.
        device: see `choose_device`.
        trust_remote_code: run Python code that comes with the checkpoint.

    Raises:
        ModelError: if there is no such model, its files are damaged, or weights are missing in them.
    """
    target = choose_device(device)
    try:
        config = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
        model, info = _factory(config).from_pretrained(
            name, dtype=dtype, trust_remote_code=trust_remote_code, output_loading_info=True
        )
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
    except Exception as error:  # transformers, safetensors and the hub's client raise many types
        raise ModelError(
            f"{name} cannot be loaded as a transformers model ({_line(error)}); give a folder with config.json, "
            "weights and tokenizer, or a name on the Hugging Face hub."
        ) from error
    absent = sorted([*info["missing_keys"], *(str(item) for item in info["mismatched_keys"])])
    if absent:
        raise ModelError(
            f"{name} lacks {len(absent)} of its weights, as {absent[0]}; its routing would be random: complete the "
            "checkpoint."
        )
    return model.to(target).eval(), tokenizer


def _factory(config: Any) -> Any:
    """Choose the class that a checkpoint was saved as; where that has no head, a class of its family that has one."""
    name = (config.architectures or [""])[0]
    found = getattr(transformers, name, None)
    if found is not None and not name.endswith("Model"):
        return found
    return AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """Hash what a tokenizer does with a text: its tokenizer.json without truncation and padding, or its vocabulary."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        value: Any = sorted(tokenizer.get_vocab().items())
    else:
        value = json.loads(backend.to_str())
        value.pop("truncation", None)  # state left by the last call, no part of the tokenizer
        value.pop("padding", None)
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def model_name(name: str) -> str:
    """Give a model's name for people: a folder's own name, or the name on the hub."""
    return Path(name).resolve().name if Path(name).exists() else name


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}".rstrip(".: ")
