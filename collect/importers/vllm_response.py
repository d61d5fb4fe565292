"""One request's routing as vLLM returns it: decoding of its array forms and matching with token ids. Knows no files.

vLLM has returned `routed_experts` as an array [tokens, layers, k] on the Python side, and in responses as nested lists,
as base64 of a `.npy` file, or as an object {data, dtype, shape}. The last generated token is never fed to the model,
so rows are one fewer than tokens, or its place is filled with zeros or -1.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import TraceError
from ..npz import UNREADABLE
from .arrays import NPY_MAGIC
from .contract import refuse

ROUTING, PROMPT_ROUTING = "routed_experts", "prompt_routed_experts"
TOKENS, PROMPT_TOKENS = "token_ids", "prompt_token_ids"
DTYPES = {name: np.dtype(name) for name in ("uint8", "int8", "uint16", "int16", "uint32", "int32", "int64")}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Request:
    """Hold one request's routing, prompt and generated tokens together."""

    name: str
    group: str
    path: Path
    place: str
    experts: np.ndarray
    """Integers [tokens, layers, k]."""
    token_ids: np.ndarray | None
    """int32 [tokens]."""
    prompt_tokens: int | None
    last_unseen: bool
    """Whether one more token was generated, which no forward saw."""


def requests_of(path: Path, place: str, name: str, value: dict[str, Any]) -> Iterator[Request]:
    """Iterate over the completions of one response or request output, as JSON has it.

    Raises:
        TraceError: if an array cannot be read, or rows and tokens do not match.
    """
    completions = value.get("choices", value.get("outputs", [value]))
    if not isinstance(completions, list) or not completions:
        raise refuse(path, place, "it has no completions")
    name = str(value.get("request_id") or value.get("id") or name)
    for index, completion in enumerate(completions):
        if not isinstance(completion, dict):
            raise refuse(path, place, f"completion {index} is no object")
        given = {**{key: value.get(key) for key in (PROMPT_ROUTING, PROMPT_TOKENS)}, **completion}
        suffix = f"/{index}" if len(completions) > 1 else ""
        yield request(path, place, f"{name}{suffix}", name, given)


def request(path: Path, place: str, name: str, group: str, given: dict[str, Any]) -> Request:
    """Put the parts of one request together.

    Raises:
        TraceError: as `requests_of`.
    """
    parts = [(key, routing_array(path, place, key, given.get(key))) for key in (PROMPT_ROUTING, ROUTING)]
    arrays = [array for _, array in parts if array is not None]
    if not arrays:
        raise refuse(path, place, f"it has no {ROUTING}; start vLLM with --enable-return-routed-experts")
    if len({array.shape[1:] for array in arrays}) > 1:
        raise refuse(path, place, "prompt and completion have routing of different layers or top-k")
    experts = np.concatenate(arrays)
    prompt, completion = (_tokens(path, place, key, given.get(key)) for key in (PROMPT_TOKENS, TOKENS))
    num_prompt = None if prompt is None else len(prompt)
    token_ids = None if prompt is None or completion is None else np.concatenate([prompt, completion])
    only_completion = completion is not None and len(experts) in (len(completion), len(completion) - 1)
    if token_ids is not None and len(experts) not in (len(token_ids), len(token_ids) - 1):
        if parts[0][1] is not None or not only_completion:
            raise refuse(path, place, f"it has {len(experts)} rows of routing for {len(token_ids)} tokens")
        token_ids, num_prompt = completion, 0  # the version that returned the prompt's routing apart, without it
    last_unseen = token_ids is not None and len(experts) == len(token_ids) - 1
    if num_prompt is not None:
        num_prompt = min(num_prompt, len(experts))
    return Request(
        name=name,
        group=group,
        path=path,
        place=place,
        experts=experts,
        token_ids=None if token_ids is None else token_ids[: len(experts)],
        prompt_tokens=num_prompt,
        last_unseen=last_unseen,
    )


def routing_array(path: Path, place: str, key: str, value: Any) -> np.ndarray | None:
    """Decode one array of routing, whatever its form; None where there is none.

    Raises:
        TraceError: if it is no array of integers [tokens, layers, k].
    """
    if value is None:
        return None
    try:
        array = _decoded(value)
    except UNREADABLE as error:
        reason = "it holds Python objects" if "pickle" in str(error) else " ".join(str(error).split())[:80].rstrip(".")
        raise refuse(path, place, f"{key} cannot be decoded ({reason})") from error
    if array.size == 0:
        return None
    if array.ndim != 3 or array.dtype.kind not in "iu":
        found = f"{array.dtype} {array.shape}"
        raise refuse(path, place, f"{key} must be integers [tokens, layers, k], got {found}")
    return array


def _decoded(value: Any) -> np.ndarray:
    if isinstance(value, np.ndarray):
        return value
    if isinstance(value, str):
        data = base64.b64decode(value, validate=True)
        if not data.startswith(NPY_MAGIC):
            raise ValueError("no base64 of a .npy file")
        return np.load(io.BytesIO(data), allow_pickle=False)
    if isinstance(value, dict):
        if value["dtype"] not in DTYPES:
            raise ValueError(f"dtype {value['dtype']!r}")
        data = base64.b64decode(value["data"], validate=True)
        return np.frombuffer(data, DTYPES[value["dtype"]]).reshape(value["shape"])
    array = np.array(value)
    if array.dtype.kind == "O":
        raise ValueError("its lists are of different lengths, or hold what is no integer")
    return array


def _tokens(path: Path, place: str, key: str, value: Any) -> np.ndarray | None:
    if value is None:
        return None
    items = value.tolist() if isinstance(value, np.ndarray) else value
    if not isinstance(items, list) or not all(type(item) is int and 0 <= item < 2**31 for item in items):
        raise TraceError(f"{path.name}, {place}: {key} must be a list of integers of 0 or more.")
    return np.array(items, np.int32)
