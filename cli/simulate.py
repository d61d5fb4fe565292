"""Replay a trace under eviction policies, and give times on a machine."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Literal

from ..collect.errors import SettingError, TraceError
from ..collect.wording import counted
from .capacities import parse_capacities
from .foresight import Foresight, add_predictor, chosen_policies, open_foresight
from .hardware_options import add_hardware, hardware_of, sizes_of
from .options import add_json

if TYPE_CHECKING:
    import numpy as np

    from ..collect.trace import SequenceRouting, Trace
    from ..runtime.hardware import HardwareProfile
    from ..runtime.simulation import PolicyResult
    from ..runtime.time_model import ModelSizes

DEFAULT_CAPACITY = "0.25"
TABLE_WIDTH = 110  # columns that the widest table takes


def parser() -> Any:
    """Build the parser of `foregate simulate`."""
    import jsonargparse

    made = jsonargparse.ArgumentParser(
        prog="foregate simulate",
        description="Replay a trace through the runtime's cache: misses of eviction policies, and times on a machine.",
    )
    made.add_argument("trace", type=str, help="folder of a trace, or an .npz file")
    made.add_argument("--sequences", type=int, default=None, help="first sequences to replay; all by default")
    made.add_argument(
        "--capacity",
        type=str,
        action="append",
        default=[],
        help="experts that the cache holds: a number, a share such as 0.25, or several with commas; "
        f"{DEFAULT_CAPACITY} by default",
    )
    made.add_argument(
        "--as",
        type=Literal["decode", "prefill", "recorded"],
        default="decode",
        help="decode: token by token; prefill: a sequence at once; recorded: its prompt at once, then token by token",
    )
    made.add_argument(
        "--policies",
        type=str,
        default=None,
        help="eviction policies, with commas; by default all, `predicted` among them where there is a --predictor",
    )
    add_predictor(made)
    made.add_argument(
        "--fit",
        type=str,
        default=None,
        help="trace that the static hot set is fitted on; by default sequences of TRACE that are not replayed, or, "
        "where there are none, the first fifth of the events",
    )
    made.add_argument("--seed", type=int, default=0, help="seed of random eviction")
    add_hardware(made)
    add_json(made)
    return made


def run(args: Any) -> int:
    """Print what every policy misses at every capacity."""
    from ..collect.smoke import smoke
    from ..collect.trace import Trace
    from ..runtime.compiled import how_replayed
    from ..runtime.events import events_of
    from ..runtime.simulation import simulate

    policies = chosen_policies(None if args.policies is None else _names(args.policies), args.predictor)
    if args.sequences is not None and args.sequences < 1:
        raise SettingError(f"sequences must be at least 1, got {args.sequences}.")
    if args.seed < 0:
        raise SettingError(f"seed must be at least 0, got {args.seed}.")
    hardware = hardware_of(args.hardware)
    trace = Trace.open(args.trace)
    sizes = sizes_of(trace.header, args.expert_mib, args.dense_ms)
    capacities = parse_capacities(args.capacity or [DEFAULT_CAPACITY], trace.topology)
    how = args["as"]
    foresight = None if args.predictor is None else open_foresight(args.predictor, trace, how)
    split = _Split(trace, foresight.rows if foresight else trace, smoke(args.sequences or 1 << 62, 20))
    foreseen, rows = {}, split.replayed()
    if foresight is not None:
        rows = list(rows)  # the predictor reads them once more
        foresight.require_rows(rows, args.trace)
    left_out = foresight.rows.left_out if foresight else 0
    events = events_of(rows, trace.topology, how)
    if not len(events):
        raise TraceError(f"{args.trace} has no token with an expert; record or import the trace again.")
    load, fitted_on = _fitted(split, args.fit, how) if "static" in policies else (None, None)
    if foresight is not None:
        foreseen = foresight.misses(events, capacities, list(rows), trace, how)
    reports = []
    for capacity in capacities:
        results = simulate(
            events,
            capacity,
            policies,
            trace.topology,
            load=load,
            seed=args.seed,
            hardware=hardware,
            sizes=sizes,
            foreseen=foreseen.get(capacity),
        )
        reports.append(
            {
                "trace": args.trace,
                "as": how,
                "sequences": split.count,
                "tokens": events.num_tokens,
                "events": len(events),
                "experts": trace.topology.num_experts,
                "capacity": capacity,
                "share": capacity / trace.topology.num_experts,
                "accesses": events.accesses,
                "policies": {name: _row(result, sizes, events.num_tokens) for name, result in results.items()},
                "static_fitted_on": fitted_on,
                "predictor": args.predictor,
                "left_out": left_out,
                "replay": how_replayed(),
                "hardware": None if hardware is None else hardware.to_json(),
                "times_missing": _why_no_times(hardware, sizes),
            }
        )
    if args.json:
        print(json.dumps(reports[0] if len(reports) == 1 else reports))
    else:
        _print(reports, foresight)
    return 0


class _Split:
    """The first sequences of a trace, and those after them."""

    def __init__(self, trace: Trace, rows: Iterable[SequenceRouting], most: int) -> None:
        self.trace, self.most = trace, most
        self.count = 0
        self._rows = iter(rows)
        self._next: SequenceRouting | None = None

    def replayed(self) -> Iterator[SequenceRouting]:
        """Iterate over the rows of the first sequences."""
        seen: set[str] = set()
        for row in self._rows:
            if row.sequence not in seen and len(seen) == self.most:
                self._next = row
                return
            seen.add(row.sequence)
            self.count = len(seen)
            yield row

    def others(self) -> Iterator[SequenceRouting]:
        """Iterate over the rows of as many sequences more."""
        if self._next is None:
            return
        seen = {self._next.sequence}
        yield self._next
        for row in self._rows:
            if row.sequence not in seen and len(seen) == self.most:
                return
            seen.add(row.sequence)
            yield row


def _fitted(split: _Split, fit: str | None, how: Literal["decode", "prefill", "recorded"]) -> tuple[Any, str]:
    """Give the load that the static policy is fitted on, and where it comes from."""
    from ..collect.trace import Trace
    from ..runtime.events import events_of
    from ..runtime.simulation import EARLY_SHARE, load_of

    topology = split.trace.topology
    if fit is not None:
        other = Trace.open(fit)
        if not other.topology.same_routing(topology):
            raise TraceError(
                f"{fit} has {other.topology.describe()}, the replayed trace {topology.describe()}; "
                "give a trace of the same model to --fit."
            )
        return load_of(events_of(other, topology, how), topology), f"the trace {fit}"
    events = events_of(split.others(), topology, how)
    if len(events):
        count = len(set(events.sequences.tolist()))
        said = f"{counted(count, 'sequence')} of the trace that {'is' if count == 1 else 'are'} not replayed"
        return load_of(events, topology), said
    return None, f"the first {EARLY_SHARE:.0%} of the replayed events, which are replayed too"


def _row(result: PolicyResult, sizes: ModelSizes, tokens: int) -> dict[str, Any]:
    """Give one policy's numbers as plain JSON values."""
    rates: np.ndarray = result.layer_misses / result.layer_accesses.clip(1)
    bytes_per_token = None if sizes.expert_bytes is None else result.misses * sizes.expert_bytes / max(1, tokens)
    return {
        "misses": result.misses,
        "miss_rate": result.miss_rate,
        "recovered_share": result.recovered_share,
        "bytes_per_token": bytes_per_token,
        "time_per_token_s": result.time_per_token_s,
        "stall_s": result.stall_s,
        "measured_over_limit": result.measured_over_limit,
        "prefetched_time_per_token_s": result.prefetched_time_per_token_s,
        "layer_miss_rates": rates.round(6).tolist(),
    }


def _why_no_times(hardware: HardwareProfile | None, sizes: ModelSizes) -> str | None:
    """Say what would have to be given for times; None where there are times."""
    missing = [] if hardware is not None else ["a machine (--hardware)"]
    missing += [f"the {name}" for name in sizes.missing]
    return ", ".join(missing) or None


def _print(reports: list[dict[str, Any]], foresight: Foresight | None) -> None:
    """Print one table per capacity."""
    from rich.console import Console
    from rich.table import Table

    # a narrow terminal wraps lines; rich itself would cut names that the next command needs
    first, console = reports[0], Console(width=max(TABLE_WIDTH, Console().width))
    console.print(
        f"{first['trace']}: {counted(first['sequences'], 'sequence')}, {counted(first['tokens'], 'token')} as "
        f"{first['as']}, {counted(first['accesses'], 'access', 'accesses')}",
        highlight=False,
    )
    for report in reports:
        table = Table(title=f"{report['capacity']} of {report['experts']} experts ({report['share']:.1%})")
        timed = report["times_missing"] is None
        table.add_column("policy")
        heads = ["misses", "miss rate", "recovered"]
        for head in heads + ["ms/token", "stall s", "x limit", "ms/token, prefetched"] * timed:
            table.add_column(head, justify="right")
        for name, row in report["policies"].items():
            share = row["recovered_share"]
            cells = [str(row["misses"]), f"{row['miss_rate']:.4f}", "-" if share is None else f"{share:.3f}"]
            if timed:
                limit = row["measured_over_limit"]
                cells += [f"{1e3 * row['time_per_token_s']:.3f}", f"{row['stall_s']:.2f}"]
                cells += ["-" if limit is None else f"{limit:.2f}", f"{1e3 * row['prefetched_time_per_token_s']:.3f}"]
            table.add_row(name, *cells)
        console.print(table)
    if first["hardware"] is not None and first["times_missing"]:
        console.print(f"No times without {first['times_missing']}; --expert-mib and --dense-ms give sizes.")
    if first["static_fitted_on"]:
        console.print(f"static is fitted on {first['static_fitted_on']}.", highlight=False)
    if foresight is not None:
        console.print(foresight.note(first["left_out"]), highlight=False)


def _names(text: str) -> list[str]:
    return list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
