"""Where training starts: from the statistics of the training sequences, from a bundle, or where a run stopped.

Knows modules, data and bundles; knows nothing of the training loop.
"""

# S token ids with an embedding of their own

from __future__ import annotations

import logging
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..collect.errors import BundleError, SettingError
from ..predictors.base import PredictorSpec
from ..predictors.bundle import WEIGHTS, Bundle
from ..predictors.network import NetworkSettings, TokenNetwork
from ..predictors.registry import settings_from_json
from ..predictors.reuse import horizon_of
from ..predictors.rows import MAX_TABLE_TOKENS, statistics
from ..predictors.token_embedding import TokenEmbedding
from ..runtime.models import find
from .data import TraceData
from .module import PredictorModule, read_checkpoint

log = logging.getLogger(__name__)


def start_anew(module: PredictorModule, data: TraceData) -> None:
    """Make the network for the data, started from its training sequences."""
    spec = _spec(module, data, data.vocab_size)
    rows = data.rows["training"]
    found = statistics(rows, spec.topology, spec.shape[1])._replace(texts=data.texts)
    spelt = np.setdiff1d(np.arange(len(data.texts or ())), found.token_ids)
    module.build(spec, np.concatenate([found.token_ids, spelt]), found, rows)
    source = module.network_settings.source_model()
    if source is not None:
        from ..collect.architectures import model_fingerprint  # transformers only here
        from ..collect.pretrained import load_pretrained

        model, _ = load_pretrained(find(source), dtype="float32")
        there, here = data.header.model_fingerprint, model_fingerprint(model.config)
        if there and there != here:
            raise SettingError(
                f"model.network.model is {source} (fingerprint {here}), and {data.trace_path} was recorded from "
                f"{data.header.model or 'another model'} ({there}); give that model."
            )
        module.network.start_from_model(model)
    _connect(module, data)


def start_from_bundle(module: PredictorModule, data: TraceData, bundle: Bundle) -> None:
    """Make the network of a bundle with its weights, and an embedding for token ids that are new in the data.

    A new token starts as the unknown one. Test sequences that the bundle was trained on are left out.

    Raises:
        BundleError: if the bundle is of another model or stack, or its network cannot take further token ids.
        DataError: if the bundle was trained on all test sequences.
    """
    bundle.require(data.header.topology, data.header.model_fingerprint)
    if bundle.spec.stack != data.stack:
        raise BundleError(
            f"{bundle.path} predicts the {bundle.spec.stack} stack, the run trains on {data.stack}; give "
            f"--data.stack {bundle.spec.stack}."
        )
    weights = bundle_weights(bundle)
    spec = _spec(module, data, max(bundle.spec.vocab_size, data.vocab_size))
    found = statistics(data.rows["training"], spec.topology, spec.shape[1])
    own = known_ids(weights)
    new = found.token_ids[~np.isin(found.token_ids, own)][: max(0, MAX_TABLE_TOKENS - len(own))]
    module.build(spec, np.concatenate([own, new]))
    _fill(module, weights, bundle)
    module.seen = np.array(sorted(bundle.training_sequences()), np.int64)
    data.leave_out(module.seen)
    _connect(module, data)
    log.info("started from %s, which knew %d token ids; %d are new", bundle.path, len(own), len(new))


def start_where_it_stopped(module: PredictorModule, data: TraceData, checkpoint: Path) -> None:
    """Make the network of a checkpoint, for Lightning to fill.

    Raises:
        SettingError: if the run that left it had another family, other settings or other data.
        DataError: if it is no checkpoint.
    """
    stored, _ = read_checkpoint(checkpoint)
    module.settle(data.stack, data.header.topology)
    family, wanted = stored["spec"]["family"], module.network_settings
    if family != wanted.family:
        raise SettingError(
            f"{checkpoint} holds a {family} network and the run is to train {wanted.family}; give --model.network as "
            "in the run that left it, or leave --resume out to start anew."
        )
    _same("--model.network", stored["settings"], wanted.to_json(), checkpoint)
    module.build(PredictorSpec.from_json(stored["spec"]), stored["known_ids"].numpy())
    module.seen = stored["seen"].numpy()
    data.leave_out(module.seen)
    _connect(module, data)
    same_place = {"trace": stored["data"].get("trace")}
    _same("--data", stored["data"], {**module.data_settings, **same_place}, checkpoint)
    if stored["sizes"] != module.sizes or not data.header.topology.same_routing(module.network.spec.topology):
        raise SettingError(
            f"{checkpoint} is of a run on another trace than {data.trace_path} (sequences and tokens by part: "
            f"{stored['sizes']} there, {module.sizes} here); name the trace of that run, or start from its bundle by "
            "--init."
        )


def bundle_weights(bundle: Bundle) -> dict[str, Tensor]:
    """Give a bundle's network parameters by name."""
    from safetensors.torch import load_file

    tensors = load_file(bundle.path / WEIGHTS)
    return {name.removeprefix("network."): value for name, value in tensors.items() if name.startswith("network.")}


def known_ids(weights: dict[str, Tensor]) -> np.ndarray:
    """Give the token ids, in the order of their rows, that a network's embedding knows, int64 [S]."""
    for name, rows in weights.items():
        if name.endswith(".rows"):
            unknown = int(rows[-1])
            ids = torch.nonzero(rows < unknown).flatten()
            return ids[rows[ids].argsort()].numpy()
    return np.zeros(0, np.int64)


def _spec(module: PredictorModule, data: TraceData, vocab_size: int) -> PredictorSpec:
    module.settle(data.stack, data.header.topology)
    network = module.network_settings
    return PredictorSpec(
        family=network.family,
        horizon=network.horizon(data.stack),
        topology=data.header.topology,
        stack=data.stack,
        vocab_size=vocab_size,
    )


@torch.no_grad()
def _fill(module: PredictorModule, weights: dict[str, Tensor], bundle: Bundle) -> None:
    """Copy weights; an embedding that has more rows now gets the unknown row for them."""
    target = module.network.state_dict()
    # bundles of an earlier version hold single numbers as [1]
    scalars = {name for name, value in target.items() if value.ndim == 0 and name in weights}
    weights = {name: value.reshape(()) if name in scalars else value for name, value in weights.items()}
    for place, part in module.network.named_modules():
        if not isinstance(part, TokenEmbedding):
            continue
        weights[f"{place}.rows"] = target[f"{place}.rows"]
        for name, new in part.state_dict(prefix=f"{place}.").items():
            old = weights.get(name)
            if old is not None and old.ndim == new.ndim == 2 and len(old) < len(new):
                weights[name] = torch.cat([old[:-1], old[-1:].expand(len(new) - len(old) + 1, -1)])
    wrong = [name for name in target if name not in weights or weights[name].shape != target[name].shape]
    if wrong or len(weights) != len(target):
        raise BundleError(
            f"{bundle.path} cannot be continued on this trace: {wrong[0] if wrong else 'its network'} has no place for "
            f"it; train a new {bundle.spec.family} predictor without --init."
        )
    module.network.load_state_dict(weights)


def _connect(module: PredictorModule, data: TraceData) -> None:
    """Tell the data what batches the network learns from, and the module where they are from."""
    if isinstance(module.network, TokenNetwork):
        data.after_tokens = horizon_of(module.network.discount)
    data.with_scores = module.distillation is not None
    if module.distillation is not None and not data.has_scores:
        log.warning(
            "%s has no router scores: %s trains by cross-entropy alone, without distillation; record the trace with "
            "--scores for both",
            data.trace_path,
            module.network.spec.family,
        )
    module.data_settings = {
        "trace": str(data.trace_path.resolve()),
        "stack": data.stack,
        "split": asdict(data.split),
        "chunk_tokens": data.chunk_tokens,
        "context_tokens": data.context_tokens,
        "batch_tokens": data.batch_tokens,
    }
    module.sizes = sizes_of(data)


def sizes_of(data: TraceData) -> dict[str, list[int]]:
    """Give sequences and tokens of each part, by which a trace is known again."""
    return {part: [len(rows), rows.num_tokens] for part, rows in data.rows.items()}


def _same(flag: str, there: dict[str, Any], here: dict[str, Any], checkpoint: Path) -> None:
    differing = [name for name in here if there.get(name) != here[name]]
    if differing:
        name = differing[0]
        raise SettingError(
            f"{checkpoint} is of a run with {flag}.{name} {there.get(name)}, the run is to have {here[name]}; give the "
            "same, or leave --resume out to start anew."
        )


def network_of(bundle: Bundle) -> NetworkSettings:
    """Give the settings of a bundle's network.

    Raises:
        BundleError: if this version of foregate has no such family, as for a free predictor.
    """
    try:
        return settings_from_json(bundle.spec.family, bundle.card["settings"])
    except (SettingError, KeyError) as error:
        raise BundleError(f"{bundle.path} holds no network that can be trained on ({error}); name another.") from error
