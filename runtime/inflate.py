"""Widening experts without changing what a model computes. Knows checkpoints and shapes; knows nothing of stores.

Each hidden unit of an expert is repeated r times and the down projection divided by r: sum_i r * (w_i / r) h_i is
what it was, up to rounding. r is a power of two, so that the division itself is exact. A small model then moves as many
bytes per expert as a large one, with its own real routing. Example: 48 KiB experts, 6 MiB wanted: r = 128, 6 MiB each.
Dense feed-forward layers whose width the same config value sets (Switch: d_ff) are widened in the same way.

An expert's units are repeated as a whole (0 1 2 0 1 2): sums then differ less than with 0 0 1 1 2 2. Tried on the
experts of foregate-mini in bfloat16 at r = 2 .. 128: one row at a time every output is bit-equal at every r, of 64 rows
99.99 % are. Dense layers are repeated unit by unit, which holds for gate and up in any arrangement.
"""

from __future__ import annotations

import copy
import json
import logging
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

from ..collect.architectures import INFLATED, MoeModule, expert_tensors, find_moe_modules
from ..collect.errors import ModelError, SettingError
from ..collect.kinds import kind_named
from ..collect.kinds.base import Widening
from ..collect.staging import staged_folder
from .checkpoint import Checkpoint, open_checkpoint, read_header, safetensors_errors
from .streaming import Layer, dense_state, expert_parameters, stream

log = logging.getLogger(__name__)

# config values that set the width of experts, the more specific first
WIDTHS = ("moe_intermediate_size", "expert_ffn_hidden_size", "d_ff", "intermediate_size")
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, kw_only=True)
class Inflation:
    """What `inflate` wrote."""

    folder: Path
    factor: int
    """Times that each hidden unit was repeated."""
    expert_bytes: int
    """Bytes of one expert of the first MoE layer afterwards."""
    setting: str
    """Config value that was multiplied."""

    def to_json(self) -> dict[str, Any]:
        """Give the values as plain JSON."""
        return {**vars(self), "folder": str(self.folder)}


@dataclass(frozen=True)
class _Widening:
    """One tensor's change: which axis grows, in which order, and whether its values shrink."""

    axis: int
    parts: int
    """Equal parts of the axis that are repeated as a whole, 2 for gate beside up; 0 repeats unit by unit."""
    divide: bool
    """It adds the hidden units up."""


def inflate(model: str | Path, out: str | Path, *, expert_mib: float, trust_remote_code: bool = False) -> Inflation:
    """Write a checkpoint with wider experts and the same function; memory holds the dense part and two MoE layers.

    Args:
        model: folder, packaged mini model or hub name of plain weights.
        out: folder that does not exist yet; it appears when it is complete.
        expert_mib: wanted MiB per expert; the power of two that comes closest is taken.
        trust_remote_code: run the model code that the checkpoint brings.

    Raises:
        ModelError: if there are no MoE layers, or no config value that sets the experts' width is known.
        SettingError: if `expert_mib` is not positive or `out` exists.
        StoreError: if the disk is too small.
    """
    if not expert_mib > 0 or not math.isfinite(expert_mib):
        raise SettingError(f"expert_mib must be a positive number of MiB, got {expert_mib}.")
    checkpoint = open_checkpoint(model, trust_remote_code=trust_remote_code)
    skeleton = checkpoint.skeleton()
    factor = choose_factor(expert_bytes(skeleton), expert_mib)
    if factor == 1:
        raise SettingError(
            f"expert_mib {expert_mib:g} is less than one and a half of the experts of {checkpoint.folder} "
            f"({expert_bytes(skeleton) / 2**20:.3g} MiB each); give at least twice their size."
        )
    setting, wide = _widen_config(checkpoint, skeleton, factor)
    plan = _plan(skeleton, wide, factor, checkpoint.folder)
    needed = sum(tensor.numel() * tensor.element_size() for tensor in wide.state_dict().values())
    with staged_folder(out, needed + (16 << 20)) as folder:
        weights: dict[str, str] = {}

        def add(index: int, item: MoeModule, tensors: Layer) -> None:
            file = f"model-experts-{index + 1:05d}.safetensors"
            state = {f"{item.name}.{name}": tensor for name, tensor in tensors.items()}
            state = {name: widen(tensor, plan.get(name), factor) for name, tensor in state.items()}
            with safetensors_errors(folder):
                save_file(state, folder / file, metadata={"format": "pt"})
            weights.update(dict.fromkeys(state, file))

        loaded = stream(checkpoint, add)
        state = {name: widen(tensor, plan.get(name), factor) for name, tensor in dense_state(loaded).items()}
        loaded.config = wide.config
        checkpoint.save(loaded, state, folder)
        _index(folder, weights)
        _note(folder, checkpoint, factor)
        stream(open_checkpoint(folder, trust_remote_code=trust_remote_code), lambda *layer: None)  # it reads back
    log.info("widened the experts of %s %d times into %s", checkpoint.folder, factor, out)
    return Inflation(folder=Path(out), factor=factor, expert_bytes=expert_bytes(wide), setting=setting)


def choose_factor(nbytes: int, expert_mib: float) -> int:
    """Give the power of two that brings an expert of `nbytes` closest to `expert_mib`."""
    exponent = max(0, math.floor(math.log2(expert_mib * 2**20 / nbytes)))
    return min((2**exponent, 2 ** (exponent + 1)), key=lambda factor: abs(factor * nbytes - expert_mib * 2**20))


def expert_bytes(model: PreTrainedModel) -> int:
    """Give the bytes of one expert of the first MoE layer."""
    first = find_moe_modules(model)[0]
    tensors = expert_tensors(model.get_submodule(first.name), first.kind, 0).values()
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def widen(tensor: torch.Tensor, change: _Widening | None, factor: int) -> torch.Tensor:
    """Repeat a tensor's hidden units; one without a change stays as it is."""
    if change is None:
        return tensor
    axis = change.axis
    if change.parts:
        repeats = [1] * (tensor.ndim + 1)
        repeats[axis + 1] = factor
        tensor = tensor.unflatten(axis, (change.parts, -1)).repeat(repeats).flatten(axis, axis + 1)
    else:
        tensor = tensor.repeat_interleave(factor, dim=axis)
    return (tensor / factor if change.divide else tensor).contiguous()


def _widen_config(checkpoint: Checkpoint, skeleton: PreTrainedModel, factor: int) -> tuple[str, PreTrainedModel]:
    """Find the config value that sets the experts' width, and build the wider model without weights."""
    before = expert_bytes(skeleton)
    for setting in WIDTHS:
        config = copy.deepcopy(checkpoint.config)
        text: Any = config.get_text_config()
        value = getattr(text, setting, None)
        if not isinstance(value, int):
            continue
        setattr(text, setting, value * factor)
        setattr(text, INFLATED, {setting: getattr(text, INFLATED, {}).get(setting, 1) * factor})
        wide = replace(checkpoint, config=config).skeleton()
        if expert_bytes(wide) > before:
            return setting, wide
    raise ModelError(
        f"{checkpoint.folder} ({checkpoint.config.model_type}) has none of the config values that set the width of "
        f"experts ({', '.join(WIDTHS)}); this family cannot be inflated."
    )


def _plan(skeleton: PreTrainedModel, wide: PreTrainedModel, factor: int, folder: Path) -> dict[str, _Widening]:
    """Say for each tensor whose shape differs how it grows."""
    experts: dict[str, Widening | None] = {}
    for item in find_moe_modules(skeleton):
        module = skeleton.get_submodule(item.name)
        for name, _ in expert_parameters(module, item):
            experts[f"{item.name}.{name}"] = kind_named(item.kind).widening(module, name)
    plan, after = {}, wide.state_dict()
    for name, tensor in skeleton.state_dict().items():
        old, new = tuple(tensor.shape), tuple(after[name].shape)
        if old == new:
            continue
        axes = [axis for axis, (left, right) in enumerate(zip(old, new, strict=True)) if left != right]
        # rows of a linear layer make hidden units, columns add them up; of what is stacked nothing is known
        dense = Widening(parts=0, divide=axes[:1] > [0]) if tensor.ndim < 3 else None
        change = experts.get(name, dense)
        if change is None or len(axes) != 1 or new[axes[0]] != old[axes[0]] * factor:
            raise ModelError(f"{folder}: tensor {name} would go from {old} to {new}; this family cannot be inflated.")
        plan[name] = _Widening(axes[0], *change)
    return plan


def _index(folder: Path, expert_weights: dict[str, str]) -> None:
    """Join dense and expert files under one index, as a sharded checkpoint."""
    path = folder / INDEX
    if path.exists():
        weights = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
    else:
        dense = folder / "model-dense.safetensors"  # model.safetensors would be taken for the whole model
        (folder / "model.safetensors").rename(dense)
        weights = dict.fromkeys(read_header(dense), dense.name)
    weights = {**weights, **expert_weights}
    total = sum((folder / name).stat().st_size for name in set(weights.values()))
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weights.items()))}
    path.write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")


def _note(folder: Path, checkpoint: Checkpoint, factor: int) -> None:
    """Say on the model's card what was done to it, after the front matter that hubs read."""
    path = folder / "README.md"
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    front = ""
    if text.startswith("---\n") and "\n---\n" in text[4:]:
        end = text.index("\n---\n", 4) + len("\n---\n")
        front, text = text[:end] + "\n", text[end:].lstrip("\n")
    note = (
        f"**Inflated {factor} x** by `foregate inflate` from {checkpoint.folder.name}: each hidden unit of an expert "
        f"is repeated {factor} times and the down projection divided by {factor}. The function is the same up to "
        "rounding, the experts move more bytes; name this wherever a speed rests on it.\n"
    )
    path.write_text(front + note + ("\n" + text if text else ""), encoding="utf-8")
