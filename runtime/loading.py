"""Loading an expert store as an ordinary transformers model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..collect.errors import SettingError, StoreError
from .checkpoint import open_checkpoint
from .config import RuntimeConfig
from .quantizer import runtime_settings
from .store import ExpertStore


def load(
    path: str | Path,
    *,
    slots: float | int | None = None,
    budget: int | str | None = None,
    predictor: str | Path | None = None,
    mode: str = "auto",
    trust_remote_code: bool = False,
    **settings: Any,
) -> Any:
    """Load a store; the model generates, streams and evaluates as any transformers model, and has `model.foregate`.

    Args:
        path: folder written by `foregate pack`.
        slots: experts to hold, as a share of all or a number; `budget` gives bytes instead (512MiB).
        predictor: predictor bundle; see `RuntimeConfig` for `mode` and further settings.
        trust_remote_code: let transformers run code that the folder brings.

    Raises:
        StoreError: if the folder is no store, or is damaged.
        ModelError: if its architecture is not one of transformers' own and its code is not trusted.
        SettingError: if a setting is out of range.
        BundleError: if the predictor does not fit the model.
    """
    known = RuntimeConfig.__dataclass_fields__
    unknown = sorted(set(settings) - set(known))
    if unknown:
        raise SettingError(f"{unknown[0]} is no setting of load; legal are {', '.join(known)}.")
    config = RuntimeConfig(
        slots=slots,
        budget=budget,
        predictor=None if predictor is None else str(predictor),
        mode=mode,  # type: ignore[arg-type]  # checked by the config
        **settings,
    )
    store = ExpertStore.open(path, trust_remote_code=trust_remote_code)  # a clear refusal before transformers starts
    config.num_slots(store.topology, store.block_bytes)
    model_class: Any = open_checkpoint(path, trust_remote_code=trust_remote_code).model_class
    with runtime_settings(config):
        model = model_class.from_pretrained(str(path), trust_remote_code=trust_remote_code)
    if not hasattr(model, "foregate"):
        raise StoreError(f"{path} was loaded without its store: its config.json has no quant_method foregate.")
    return model
