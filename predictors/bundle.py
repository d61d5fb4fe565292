"""Predictor bundles: a folder of predictor.onnx, weights.safetensors and card.json, read without torch.

Knows files, checksums and cards; knows no family. card.json says what the predictor predicts, for which model, and how
well; every byte of a bundle is covered by its checksums. Bundles of the layer horizon have a second graph, ahead.onnx.
weights.safetensors holds the network's parameters (`network.*`), the state before the first token (`start.*`, batch of
one) and the fingerprints of the sequences that training saw (`training.sequences`), so that nobody evaluates on them by
mistake.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..collect.errors import BundleError, SettingError
from ..collect.topology import MoeTopology
from .base import Predictor, PredictorSpec

FORMAT_VERSION = 1
CARD, GRAPH, AHEAD, WEIGHTS = "card.json", "predictor.onnx", "ahead.onnx", "weights.safetensors"
SEQUENCES = "training.sequences"


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """An opened bundle whose checksums were verified."""

    path: Path
    """The folder."""
    card: dict[str, Any]
    """What card.json says."""
    spec: PredictorSpec
    """What it predicts."""

    @classmethod
    def open(cls, path: str | Path) -> Bundle:
        """Open a bundle and verify it.

        Raises:
            BundleError: if it is missing, damaged, altered, or of another format version.
        """
        path = Path(path)
        if not (path / CARD).is_file():
            raise BundleError(
                f"{path} is no predictor bundle: it has no {CARD}; give a folder written by foregate train."
            )
        try:
            card = json.loads((path / CARD).read_text(encoding="utf-8"))
            version = card["format_version"]
            if version != FORMAT_VERSION:
                raise BundleError(
                    f"{path} has bundle format version {version!r}; this foregate reads {FORMAT_VERSION}: export anew."
                )
            checksums = card["checksums"]
            for name, found in _checksums(path, card).items():
                if checksums[name] != found:
                    raise BundleError(
                        f"{path} was altered: {name} does not match its checksum; export or copy it again."
                    )
            spec = PredictorSpec.from_json(card)
            _check_card(card, spec)
        except (KeyError, TypeError, ValueError, OSError) as error:  # JSON and topology errors are ValueErrors
            reason = error if isinstance(error, OSError | SettingError) else f"{type(error).__name__} {error}"
            raise BundleError(f"{path} is damaged ({reason}); export or copy it again.") from error
        return cls(path=path, card=card, spec=spec)

    def require(self, topology: MoeTopology, model_fingerprint: str | None = None) -> None:
        """Refuse a model that the predictor was not made for.

        Raises:
            BundleError: if the MoE layers differ, or both fingerprints are known and differ.
        """
        if not self.spec.topology.same_routing(topology):
            raise BundleError(
                f"{self.path} predicts a model with {self.spec.topology.describe()}, but this model has "
                f"{topology.describe()}{_where(self.spec.topology, topology)}; train one on a trace of this model."
            )
        own = self.card.get("model_fingerprint")
        if own and model_fingerprint and own != model_fingerprint:
            raise BundleError(
                f"{self.path} was trained for the model {self.card.get('model') or '?'} (fingerprint {own}), but this "
                f"model's is {model_fingerprint}; train a predictor on a trace of this model."
            )

    def tensor(self, name: str) -> np.ndarray:
        """Read one tensor of weights.safetensors."""
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(str(self.path / WEIGHTS), framework="np") as file:
                return file.get_tensor(name)
        except SafetensorError as error:
            raise BundleError(
                f"{self.path} is damaged ({WEIGHTS} gives no {name}: {error}); export or copy it again."
            ) from error

    def start(self) -> dict[str, np.ndarray]:
        """Give the state before the first token of one sequence, in the graph's order."""
        return {name: self.tensor(f"start.{name}") for name in self.card["state"]}

    def training_sequences(self) -> set[int]:
        """Give the fingerprints (`rows.fingerprint`) of the sequences that training saw."""
        return set(self.tensor(SEQUENCES).tolist())


def load_predictor(path: str | Path | Bundle) -> Predictor:
    """Open a bundle and load its predictor with onnxruntime, by the horizon on its card.

    Raises:
        BundleError: as `Bundle.open`, and where onnxruntime cannot load the graph.
    """
    from .onnx_predictor import OnnxBatchPredictor, OnnxLayerPredictor, OnnxTokenPredictor  # onnxruntime only here
    from .onnx_session import Session

    bundle = path if isinstance(path, Bundle) else Bundle.open(path)
    session = Session(str(bundle.path / GRAPH))
    if bundle.spec.horizon == "batch":
        return OnnxBatchPredictor(bundle.spec, session)
    if bundle.spec.horizon == "token":
        return OnnxTokenPredictor(bundle.spec, session, bundle.start(), bundle.card["rings"])
    ahead = Session(str(bundle.path / AHEAD))
    return OnnxLayerPredictor(bundle.spec, session, bundle.start(), bundle.card["rings"], ahead, bundle.card["reach"])


def seal(folder: Path, card: dict[str, Any]) -> None:
    """Write card.json into a folder that holds the other files, with the checksums of all."""
    card = {"format_version": FORMAT_VERSION, **card}
    card["checksums"] = _checksums(folder, card)
    (folder / CARD).write_text(json.dumps(card, indent=1, ensure_ascii=True) + "\n", encoding="utf-8")


def check_target(out: Path) -> None:
    """Refuse a path that no bundle can be written to; a run calls this before its slow parts.

    Raises:
        BundleError: if something stands there already, an empty folder aside: nothing is ever replaced.
    """
    if not out.name:
        raise BundleError(f"{out} is no name for a bundle; name a folder that is empty or does not exist.")
    if not out.exists():
        above = next(parent for parent in out.absolute().parents if parent.exists())
        if not above.is_dir():
            raise BundleError(f"{above} is a file, and {out} a folder in it; name another folder.")
        return
    if not out.is_dir() or any(out.iterdir()):
        raise BundleError(f"{out} exists already; remove it or name another folder.")


def _check_card(card: dict[str, Any], spec: PredictorSpec) -> None:
    """Refuse a card whose entries are not what readers take them for; checksums vouch for bytes, not for sense."""
    training, heat = card.get("training", {}), card.get("temperature") or {}
    if not isinstance(training, dict):
        raise ValueError(f"training must be an object, got {training!r}")
    if not isinstance(heat, dict) or not all(
        isinstance(value, int | float) and 0 < value < math.inf for value in heat.values()
    ):
        raise ValueError(f"temperature must give a positive number for each horizon, got {heat!r}")
    if spec.horizon != "batch":
        state, rings = card["state"], card["rings"]
        if not isinstance(state, list) or not isinstance(rings, list) or not set(rings) <= set(state):
            raise ValueError(f"rings must be names of the state, got {rings!r} of {state!r}")
    if spec.horizon == "layer" and not (isinstance(card["reach"], int) and card["reach"] >= 1):
        raise ValueError(f"reach must be at least 1, got {card['reach']!r}")


def _checksums(folder: Path, card: dict[str, Any]) -> dict[str, str]:
    """Hash each file, and the card without its checksums."""
    found = {}
    for name in (GRAPH, WEIGHTS, *([AHEAD] if card["horizon"] == "layer" else [])):
        with (folder / name).open("rb") as file:
            found[name] = hashlib.file_digest(file, "sha256").hexdigest()
    rest = {name: value for name, value in card.items() if name != "checksums"}
    found[CARD] = hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()
    return found


def _where(ours: MoeTopology, theirs: MoeTopology) -> str:
    """Name the first layer that differs, where the two descriptions read the same."""
    if ours.describe() != theirs.describe():
        return ""
    index = next(i for i, (a, b) in enumerate(zip(ours.layers, theirs.layers, strict=True)) if a != b)
    return f" (MoE layer {index} is block {ours.layers[index].block} there and {theirs.layers[index].block} here)"
