"""Train a predictor on a trace and export it as a bundle."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..collect.errors import SettingError
from ..collect.smoke import smoke
from .options import add_config, add_json, spell_flags

SMOKE_MINUTES, SMOKE_STEPS = 0.1, 20


def parser() -> Any:
    """Build the parser of `foregate train`."""
    # Read when torch is loaded: with huge pages a step at 26 layers of 64 experts takes 1.17 s instead of 1.41.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    import jsonargparse
    from lightning.pytorch.cli import LightningArgumentParser

    from ..predictors.copy_attention import CopyAttentionSettings
    from ..predictors.network import NetworkSettings
    from ..train.data import TraceData
    from ..train.fit import FitSettings
    from ..train.module import PredictorModule
    from ..train.tracking import Tracker

    jsonargparse.set_parsing_settings(docstring_parse_attribute_docstrings=True, subclasses_enabled=[NetworkSettings])
    made = LightningArgumentParser(
        prog="foregate train",
        description="Train a predictor on a trace, keep its best weights, and export them as a bundle.",
    )
    add_config(made, "train")
    made.add_argument("--trace", type=str, required=True, help="folder of a trace, or an .npz file")
    made.add_argument("--out", type=str, required=True, help="folder of the bundle to write")
    made.add_argument("--max_minutes", type=float, help="training time; export follows (short for fit.max_minutes)")
    made.add_argument("--run_dir", type=str, help="folder of checkpoints and metrics; OUT.run by default")
    made.add_argument("--resume", type=bool, default=False, help="go on from the last checkpoint of the run folder")
    made.add_argument("--init", type=str, help="a bundle that training goes on from; its network is taken as it is")
    made.add_argument(
        "--tracker", type=Tracker, default="wandb", help="where metrics go; wandb is offline unless WANDB_MODE says"
    )
    made.add_class_arguments(FitSettings, "fit")
    made.add_lightning_class_args(TraceData, "data")
    made.add_lightning_class_args(PredictorModule, "model")
    made.link_arguments("trace", "data.trace")
    name = f"{CopyAttentionSettings.__module__}.{CopyAttentionSettings.__qualname__}"
    made.set_defaults({"model.network": {"class_path": name}})
    add_json(made)
    spell_flags(made)
    return made


def run(args: Any) -> int:
    """Train, export, and print what the bundle is worth."""
    from ..predictors.bundle import Bundle, check_target
    from ..train.fit import fit
    from ..train.tracking import open_logger
    from ..train.trainer import leads

    out = Path(args.out)
    check_target(out)
    built = parser().instantiate(args)
    settings = built.fit
    minutes = settings.max_minutes if args.max_minutes is None else args.max_minutes
    settings = replace(settings, max_minutes=smoke(minutes, SMOKE_MINUTES))
    run_dir = Path(args.run_dir) if args.run_dir else out.with_name(out.name + ".run")
    if run_dir == out or out in run_dir.parents:
        raise SettingError(f"run_dir must lie outside of the bundle's folder, which is {out}, got {run_dir}.")
    init = None if args.init is None else Bundle.open(args.init)
    module = _unsettled(built.model) if init is None else _continued(built.model, init)

    def logger() -> Any:
        return open_logger(args.tracker, run_dir, out.name, resume=args.resume) if leads() else None

    places: dict[str, Any] = {"run_dir": run_dir, "resume": args.resume, "init": init}
    result = fit(built.data, module, out, settings, **places, logger=logger, progress=True)
    if not leads():
        return 0
    if args.json:
        print(json.dumps(result))
    else:
        metrics = result["metrics"]
        print(
            f"{result['bundle']}: {result['family']}, recall at top-k {metrics['recall_at_k']:.3f} on unseen sequences"
        )
        for name, value in sorted(metrics["baselines"].items(), key=lambda item: -item[1]):
            print(f"  {name:<15} {value:.3f}")
    return 0


def _unsettled(module: Any) -> Any:
    """Give a module whose family the stack chooses, where the network is the parser's own: nothing was asked for."""
    from ..predictors.copy_attention import CopyAttentionSettings
    from ..train.module import PredictorModule

    return PredictorModule(None, **module.given_rates) if module.network_settings == CopyAttentionSettings() else module


def _continued(module: Any, init: Any) -> Any:
    """Give a module with the rates of one and the network of a bundle.

    Raises:
        SettingError: if another network was asked for.
    """
    from ..predictors.copy_attention import CopyAttentionSettings
    from ..train.module import PredictorModule
    from ..train.starting_point import network_of

    network = network_of(init)
    if module.network_settings not in (network, CopyAttentionSettings()):  # the parser's own
        raise SettingError(
            f"model.network is given and --init {init.path} goes on with the {network.family} network of that bundle; "
            "leave one of them out."
        )
    return PredictorModule(network, **module.given_rates)
