"""Say what prefetching, caching and training can gain on a recorded model."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..collect.errors import SettingError

CAPACITY = "0.25"  # a quarter, as the reference counts have it
PAGE = "assessment.html"  # its name where --out is a folder


def parser() -> Any:
    """Build the parser of `foregate assess`."""
    import jsonargparse

    from .hardware_options import add_hardware
    from .options import add_json

    made = jsonargparse.ArgumentParser(
        prog="foregate assess",
        description="Say what prefetching and caching can gain on a recorded model, and whether training is worth it.",
    )
    made.add_argument("trace", type=str, help="folder of a trace, an .npz file, or a load table (balance only)")
    made.add_argument(
        "--sequences",
        type=int,
        default=None,
        help="whole sequences to look at, drawn with the seed; by default as many as take about a minute",
    )
    made.add_argument(
        "--as",
        dest="reading",
        type=str,
        default="decode",
        help="decode: every token a step of its own; prefill: every sequence one step; recorded: prompts as prefill "
        "and the rest as decode",
    )
    made.add_argument(
        "--capacity",
        type=str,
        default=CAPACITY,
        help="experts that fit in slots: a number, or a share such as 0.25 or 25%; 1.0 are all, 1 is one",
    )
    add_hardware(made)
    made.add_argument("--seed", type=int, default=0, help="of the draw, of random eviction and of the intervals")
    made.add_argument(
        "--out",
        type=str,
        default=None,
        help=f"HTML report to write: a new file, or a folder that gets {PAGE} and has none yet",
    )
    add_json(made)
    return made


def run(args: Any) -> int:
    """Print the verdict and the numbers that it rests on; write the page where asked for."""
    from ..collect import load_table

    page = None if args.out is None else page_path(args.out)
    if (Path(args.trace) / load_table.HEADER_NAME).is_file():
        from ..runtime.assessment.load_table import assess_load, load_lines, write_load

        _refuse_options(args)
        values = assess_load(load_table.LoadTable.open(args.trace))
        return _give(args, page, values, write_load, load_lines)
    from ..collect.trace import Trace
    from ..runtime.assessment.assess import AssessConfig, assess
    from ..runtime.assessment.page import write_assessment
    from ..runtime.assessment.tables import lines_of
    from .capacities import parse_capacities
    from .hardware_options import hardware_of, sizes_of

    config = AssessConfig(sequences=args.sequences, reading=args.reading, seed=args.seed)
    hardware = hardware_of(args.hardware)
    trace = Trace.open(args.trace)
    capacities = parse_capacities([args.capacity], trace.topology)
    if len(capacities) > 1:
        raise SettingError(
            f"capacity must be one for an assessment, which draws the curve over all, got {args.capacity}."
        )
    config = replace(config, capacity=capacities[0])
    values = assess(trace, config, hardware, sizes_of(trace.header, args.expert_mib, args.dense_ms))
    return _give(args, page, values, write_assessment, lines_of)


def _refuse_options(args: Any) -> None:
    """Refuse options that say nothing about a load table, instead of leaving them out quietly."""
    usual = {"sequences": None, "reading": "decode", "capacity": CAPACITY, "hardware": None}
    for name, value in {**usual, "expert_mib": None, "dense_ms": None}.items():
        if args[name] != value:
            option = "as" if name == "reading" else name.replace("_", "-")
            raise SettingError(f"{args.trace} is a load table, which holds no tokens to replay; leave out --{option}.")


def _give(args: Any, page: Path | None, values: dict[str, Any], write: Any, lines_of: Any) -> int:
    if page is not None:
        write(page, values)
        values["report"] = str(page)
    if args.json:
        print(json.dumps(values, allow_nan=False))
    else:
        print("\n".join(lines_of(values)))
        if page is not None:
            print(f"Report: {page}")
    return 0


def page_path(out: str) -> Path:
    """Give the page's path: `out` itself where it ends in .html, else a file in the folder `out`, which may be new.

    Raises:
        SettingError: if its folder cannot hold it, or something stands there already.
    """
    path = Path(out)
    if path.suffix.lower() in (".html", ".htm"):
        if path.is_dir():
            raise SettingError(f"{path} is a folder; give --out another file or a folder without .html in its name.")
        if not path.parent.is_dir():
            raise SettingError(f"{path.parent} is no folder; give --out a path in an existing folder.")
        return _new(path)
    if path.exists() and not path.is_dir():
        raise SettingError(f"{path} is a file; give --out a folder, or a name that ends in .html.")
    _new(path / PAGE)
    path.mkdir(parents=True, exist_ok=True)
    return path / PAGE


def _new(path: Path) -> Path:
    """Give a path back where nothing stands."""
    if path.exists() or path.is_symlink():
        raise SettingError(f"{path} exists already; give --out another name or remove it.")
    return path
