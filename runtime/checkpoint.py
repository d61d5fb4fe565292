"""A checkpoint folder: where it is, its config, its model class, its headers. Loads no weights; imports torch late."""

from __future__ import annotations

import contextlib
import json
import shutil
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..collect.errors import ModelError, StoreError
from . import models

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")
WEIGHT_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
MAX_SHARD = "4GB"
MAX_HEADER_BYTES = 100_000_000  # what safetensors itself allows


class StoredTensor(NamedTuple):
    """Place one tensor in a safetensors file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    """First byte, from the start of the file."""
    end: int
    """One past its last byte."""


@dataclass(frozen=True)
class Checkpoint:
    """A model folder whose config could be read."""

    folder: Path
    config: PreTrainedConfig
    trust_remote_code: bool = False

    @cached_property
    def fingerprint(self) -> str:
        """Fingerprint of its config."""
        from ..collect.architectures import model_fingerprint

        return model_fingerprint(self.config)

    @property
    def quant_method(self) -> str | None:
        """Name of its quantization method; None for plain weights, foregate for a packed store."""
        value = getattr(self.config, "quantization_config", None)
        method = value.get("quant_method") if isinstance(value, dict) else getattr(value, "quant_method", None)
        return None if value is None else str(getattr(method, "value", method))

    @cached_property
    def model_class(self) -> type[PreTrainedModel]:
        """Class that its config asks for.

        Raises:
            ModelError: if it is not a class of transformers and remote code is not trusted.
        """
        import transformers

        names = self.config.architectures or []
        found = getattr(transformers, names[0], None) if names else None
        if found is not None:
            return found
        auto: Any = transformers.AutoModelForCausalLM
        if getattr(self.config, "is_encoder_decoder", False):
            auto = transformers.AutoModelForSeq2SeqLM
        if self.trust_remote_code and names:
            from transformers.dynamic_module_utils import get_class_from_dynamic_module

            reference = getattr(self.config, "auto_map", {}).get(auto.__name__)
            if reference is not None:
                return get_class_from_dynamic_module(reference, str(self.folder))
        elif not names and type(self.config) in auto._model_mapping:
            return auto._model_mapping[type(self.config)]
        raise ModelError(
            f"{self.folder} asks for the model class {names[0] if names else 'none'}, which transformers "
            f"{transformers.__version__} does not have; update transformers or allow its own code."
        )

    def skeleton(self, dtype: torch.dtype | None = None) -> PreTrainedModel:
        """Build the model without weights, on the meta device; its dtype is the config's where none is given."""
        import torch

        plain = type(self.config).from_dict(self.config.to_dict())
        plain.__dict__.pop("quantization_config", None)
        with torch.device("meta"):
            return self.model_class._from_config(plain, dtype=dtype or self.config.dtype or torch.float32)

    def save(self, model: PreTrainedModel, state: dict[str, torch.Tensor], folder: Path) -> None:
        """Write config, generation config, the given tensors and everything else a model folder has, but no experts."""
        from transformers import GenerationConfig

        from ..collect.architectures import left_as_they_are

        generation = self.folder / "generation_config.json"
        if generation.is_file():
            # copied, since many published ones do not pass the checks of save_pretrained
            model.generation_config = GenerationConfig()
        # where experts of one part are left out and those of another are not, the layout on disk may want both
        original = not left_as_they_are(model)
        with safetensors_errors(folder):
            model.save_pretrained(folder, state_dict=state, max_shard_size=MAX_SHARD, save_original_format=original)
        if generation.is_file():
            shutil.copyfile(generation, folder / generation.name)
        self.copy_extras(folder)

    def weight_bytes(self) -> int:
        """Size of its weight files."""
        return sum(path.stat().st_size for path in self.folder.iterdir() if path.suffix in WEIGHT_SUFFIXES)

    def copy_extras(self, target: Path) -> None:
        """Copy what is neither weights nor written by `save_pretrained`: tokenizer, templates, card, own code."""
        for path in sorted(self.folder.iterdir()):
            skipped = path.suffix in WEIGHT_SUFFIXES or path.name in WEIGHT_INDEXES or path.name.startswith(".")
            if path.is_file() and not skipped and not (target / path.name).exists():
                shutil.copyfile(path, target / path.name)


def open_checkpoint(model: str | Path, *, trust_remote_code: bool = False) -> Checkpoint:
    """Find a model by folder, by the name of a packaged mini model, or on the Hugging Face hub; read its config.

    Raises:
        ModelError: if there is no such model or its config cannot be read.
    """
    folder = find_folder(model)
    if not (folder / "config.json").is_file():
        raise ModelError(f"{folder} is no model folder (no config.json); give one that save_pretrained wrote.")
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = " ".join(str(error).split())
        raise ModelError(f"{folder / 'config.json'} is no config that transformers can read ({reason}).") from error
    return Checkpoint(folder, config, trust_remote_code)


def find_folder(model: str | Path) -> Path:
    """Give the local folder of a model; a hub name is downloaded.

    Raises:
        ModelError: if there is no such folder and the hub has no such name or cannot be reached.
    """
    found = models.find(str(model))
    if Path(found).is_dir():
        return Path(found)
    names = f"a model folder, one of {', '.join(models.names())}, or a name on the Hugging Face hub"
    if "/" not in found:
        raise ModelError(f"There is no model folder {model}; give {names}.")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(str(model), ignore_patterns=["*.bin", "*.pt", "*.gguf", "*.h5", "*.onnx"]))
    except (OSError, ValueError) as error:  # bases of all errors of the hub's client
        reason = " ".join(str(error).split())
        raise ModelError(
            f"{model} is no store or model folder and could not be fetched from the hub ({reason}); give {names}."
        ) from error


@contextlib.contextmanager
def safetensors_errors(folder: Path) -> Iterator[None]:
    """Turn what safetensors raises when it cannot write, which is no OSError, into one of ours."""
    from safetensors import SafetensorError

    try:
        yield
    except SafetensorError as error:
        raise StoreError(
            f"{folder.parent} could not be written to ({error}); free some space or name another."
        ) from error


def open_tokenizer(folder: Path, *, trust_remote_code: bool = False) -> Any:
    """Load the tokenizer of a model folder.

    Raises:
        ModelError: if the folder has none (transformers would make up an empty one for some families).
    """
    from transformers import AutoTokenizer

    names = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")
    if not any((folder / name).is_file() for name in names):
        raise ModelError(f"{folder} has no tokenizer; put the model's tokenizer files there.")
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = " ".join(str(error).split())
        raise ModelError(f"{folder} has no tokenizer that transformers can load ({reason}).") from error


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Read where a safetensors file keeps its tensors.

    Raises:
        ModelError: if it is no safetensors file or its header is damaged.
    """
    try:
        with open(path, "rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > MAX_HEADER_BYTES:
                raise ValueError(f"a header of {length} bytes")
            header = json.loads(file.read(length))
        base = 8 + length
        return {
            name: StoredTensor(
                item["dtype"],
                tuple(item["shape"]),
                base + item["data_offsets"][0],
                base + item["data_offsets"][1],
            )
            for name, item in header.items()
            if name != "__metadata__"
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise ModelError(f"{path} is no safetensors file ({error}); fetch or save the checkpoint again.") from error
