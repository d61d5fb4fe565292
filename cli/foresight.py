"""The option `--predictor` of a replay: a bundle whose forecasts are replayed on sequences that it has not seen."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ..collect.errors import BundleError, DataError, SettingError
from ..collect.mistaken import require_kind
from ..collect.wording import counted

if TYPE_CHECKING:
    import numpy as np

    from ..collect.trace import SequenceRouting, Trace
    from ..predictors.base import Predictor
    from ..runtime.events import Events, Reading
    from ..runtime.foresight import Unseen


def add_predictor(parser: Any) -> None:
    """Add `--predictor BUNDLE`."""
    parser.add_argument(
        "--predictor",
        type=str,
        default=None,
        help="folder of a predictor bundle, for the policy `predicted`; sequences that its training saw are left out",
    )


class Foresight(NamedTuple):
    """A predictor, and the rows of a trace that it has not seen."""

    bundle: str
    predictor: Predictor
    rows: Unseen

    def misses(
        self, events: Events, capacities: Iterable[int], rows: Sequence[SequenceRouting], trace: Trace, how: Reading
    ) -> dict[int, np.ndarray]:
        """Replay `predicted` at several capacities; misses of each event by capacity."""
        from ..runtime.foreseen import foreseen_misses
        from ..runtime.foresight import forecasts_of

        forecasts = forecasts_of(self.predictor, rows, trace.topology, how)
        return foreseen_misses(events, capacities, trace.topology, forecasts)

    def require_rows(self, rows: Sequence[SequenceRouting], trace: str) -> None:
        """Refuse a trace of which nothing is left.

        Raises:
            DataError: if training saw all of it.
        """
        if not rows and self.rows.left_out:
            raise DataError(
                f"Training of {self.bundle} saw every sequence of {trace} ({self.rows.left_out}), and replaying those "
                "would say nothing of others; give a trace of other text."
            )

    def note(self, left_out: int) -> str:
        """Say what is not replayed."""
        return (
            f"predicted follows {self.bundle}; {counted(left_out, 'sequence')} of the trace "
            f"{'is' if left_out == 1 else 'are'} left out, since its training saw "
            f"{'it' if left_out == 1 else 'them'}."
        )


def open_foresight(path: str, trace: Trace, how: Reading) -> Foresight:
    """Open a bundle for a trace.

    Raises:
        BundleError: if it is none, damaged, or made for another model.
        SettingError: if it cannot foresee such a reading.
    """
    from ..predictors.hub import local_bundle

    folder = local_bundle(path)
    wrong = require_kind(folder, "card.json", "give a folder written by foregate train.")
    if wrong is not None:
        raise BundleError(wrong)
    from ..predictors.bundle import Bundle, load_predictor
    from ..predictors.rows import join_parts
    from ..runtime.foresight import Unseen, check_foresight

    bundle = Bundle.open(folder)
    check_foresight(bundle.spec, how)
    bundle.require(trace.topology, trace.header.model_fingerprint)
    rows = Unseen(join_parts(trace), bundle.spec, bundle.training_sequences())
    return Foresight(path, load_predictor(bundle), rows)


def chosen_policies(given: list[str] | None, predictor: str | None) -> list[str]:
    """Give the policies to replay: those given, by default all that can be.

    Raises:
        SettingError: if a name is none, there is none, or a predictor has nothing to do.
    """
    from ..runtime.policies.registry import POLICIES, SIMULATED, check_policies

    known = SIMULATED if predictor is None else tuple(POLICIES)
    names = list(known) if given is None else given
    check_policies(names, foreseen=predictor is not None)
    if not names:
        raise SettingError(f"policies must name at least one of {', '.join(known)}, got nothing.")
    if predictor is not None and "predicted" not in names:
        raise SettingError(
            f"policies must name predicted where there is a --predictor, got {','.join(names)}; add predicted to "
            "--policies, or leave --predictor out."
        )
    return names
