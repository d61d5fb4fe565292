"""Generate text with a model that runs from a store."""

from __future__ import annotations

import json
import logging
import math
import sys
import time
from pathlib import Path
from typing import Any

from ..collect.errors import DataError, ModelError, SettingError, StoreError
from ..collect.mistaken import require_kind

log = logging.getLogger(__name__)

MIN_TEMPERATURE = 1e-3  # logits divided by less overflow


def parser() -> Any:
    """Build the parser of `foregate generate`."""
    import jsonargparse

    from ..runtime.config import RuntimeConfig
    from .options import add_json, spell_flags

    jsonargparse.set_parsing_settings(docstring_parse_attribute_docstrings=True)
    parser = jsonargparse.ArgumentParser(
        prog="foregate generate",
        description="Generate text with a model that runs from a store. The text goes to standard output as it comes.",
    )
    parser.add_argument("store", type=str, help="folder that 'foregate pack' wrote")
    parser.add_argument("--prompt", type=str, default=None, help="text to go on from")
    parser.add_argument("--prompt_file", type=str, default=None, help="file with the text instead; - is standard input")
    parser.add_argument("--max_new_tokens", type=int, default=64, help="tokens to generate at most")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 takes the likeliest token, else sample")
    parser.add_argument("--seed", type=int, default=0, help="of sampling")
    parser.add_argument("--trust_remote_code", type=bool, default=False, help="run model code that the store brings")
    parser.add_class_arguments(RuntimeConfig, as_group=False)
    add_json(parser)
    spell_flags(parser)
    return parser


def run(args: Any) -> int:
    """Generate, and print the text or one JSON value."""
    from dataclasses import asdict

    from ..runtime import models
    from ..runtime.config import RuntimeConfig
    from .options import settings_from

    config = settings_from(args, RuntimeConfig)
    if args.max_new_tokens < 1:
        raise SettingError(f"max_new_tokens must be at least 1, got {args.max_new_tokens}.")
    if args.temperature != 0 and not MIN_TEMPERATURE <= args.temperature < math.inf:
        raise SettingError(f"temperature must be 0 or at least {MIN_TEMPERATURE}, got {args.temperature}.")
    if not 0 <= args.seed < 2**64:
        raise SettingError(f"seed must lie in 0..2**64 - 1, got {args.seed}.")
    prompt = _prompt(args.prompt, args.prompt_file)
    packable = (Path(args.store) / "config.json").is_file() or args.store in models.names()
    how = f", as foregate pack {args.store} --out STORE" if packable else ""
    wrong = require_kind(args.store, "foregate.json", f"give a folder that foregate pack wrote{how}.")
    if wrong is not None:
        raise StoreError(wrong)

    import torch
    from transformers import TextStreamer

    from ..collect.anatomy import text_model
    from ..runtime import load
    from ..runtime.checkpoint import open_tokenizer

    whole = load(args.store, trust_remote_code=args.trust_remote_code, **asdict(config))
    model = text_model(whole)
    with whole.foregate as handle:
        if not model.can_generate():
            raise ModelError(
                f"{args.store} holds a {type(model).__name__}, which generates no text; run it from Python."
            )
        tokenizer = open_tokenizer(Path(args.store), trust_remote_code=args.trust_remote_code)
        inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
        if not inputs["input_ids"].numel():
            raise SettingError(f"prompt must hold at least one token, got {prompt!r}.")
        largest, known = int(inputs["input_ids"].max()), model.get_input_embeddings().num_embeddings
        if largest >= known:
            raise ModelError(
                f"{args.store} has a tokenizer of another model: it gives token id {largest}, the model knows "
                f"0..{known - 1}; put the model's own tokenizer files there."
            )
        length, positions = (
            inputs["input_ids"].shape[1],
            getattr(model.config.get_text_config(), "max_position_embeddings", None),
        )
        if positions is not None and not model.config.is_encoder_decoder and length >= positions:
            raise SettingError(f"prompt must have fewer tokens than the model's {positions} positions, got {length}.")
        sampling = {"do_sample": True, "temperature": args.temperature} if args.temperature else {"do_sample": False}
        streamer = None if args.json else TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
        torch.manual_seed(args.seed)
        start = time.perf_counter()
        output = model.generate(**inputs, max_new_tokens=args.max_new_tokens, streamer=streamer, **sampling)
        seconds = time.perf_counter() - start
        stats = handle.stats()
    skipped = 1 if model.config.is_encoder_decoder else inputs["input_ids"].shape[1]
    new = output[0, skipped:].tolist()
    speed = len(new) / seconds
    if args.json:
        text = tokenizer.decode(new, skip_special_tokens=True)
        print(json.dumps({"text": text, "token_ids": new, "tokens_per_s": speed, "stats": stats.to_json()}))
    else:
        log.info(
            "%d tokens, %.1f tokens/s; %d hits, %d delayed hits, %d misses; %.1f MiB read, %.2f s stalled; %s: %s",
            len(new),
            speed,
            stats.hits,
            stats.delayed_hits,
            stats.misses,
            stats.bytes_read / 2**20,
            stats.stall_s,
            stats.mode,
            stats.reason,
        )
    return 0


def _prompt(text: str | None, file: str | None) -> str:
    if (text is None) == (file is None):
        raise SettingError(
            f"Give one of --prompt TEXT and --prompt-file FILE, got {'none' if text is None else 'both'}."
        )
    prompt = text if text is not None else _read(str(file))
    try:
        prompt.encode()
    except UnicodeEncodeError:  # bytes of a command line or of standard input that are no UTF-8
        raise DataError(f"{prompt[:80]!r} is no text; give a prompt in UTF-8.") from None
    return prompt


def _read(file: str) -> str:
    try:
        return sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise DataError(f"{file} is no text that can be read ({error}); give a UTF-8 file.") from error
