"""Which sequences train, validate and test: whole groups, never tokens. Knows names and hashes, no tensors."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

from ..collect.errors import DataError, SettingError

Part = Literal["training", "validation", "test"]
Order = Literal["hash", "file"]
By = Literal["group", "category"]


@dataclass(frozen=True, kw_only=True)
class SplitSettings:
    """How groups (documents, conversations; else sequences) are dealt out."""

    test_share: float = 0.2
    """Share of the groups that training never sees; all reported numbers are theirs."""
    validation_share: float = 0.05
    """Share of the groups that choose the best weights and when to stop."""
    order: Order = "hash"
    """hash: by a seeded hash of the group's name. file: test groups are the last of the trace."""
    seed: int = 0
    """Seed of the hash."""
    by: By = "group"
    """group: documents, conversations, else sequences. category: all sequences of a category stand together, so that
    the test is of kinds of text that training never saw."""

    def __post_init__(self) -> None:
        if self.order not in get_args(Order):
            raise SettingError(f"order must be one of {', '.join(get_args(Order))}, got {self.order!r}.")
        if self.by not in get_args(By):
            raise SettingError(f"by must be one of {', '.join(get_args(By))}, got {self.by!r}.")
        for name in ("test_share", "validation_share"):
            if not 0 < getattr(self, name) < 1:
                raise SettingError(f"{name} must lie between 0 and 1, got {getattr(self, name)}.")
        if self.test_share + self.validation_share >= 1:
            raise SettingError(
                f"test_share and validation_share must leave something to train on, got {self.test_share} and "
                f"{self.validation_share}; make their sum smaller than 1."
            )


def split_groups(groups: Iterable[str], settings: SplitSettings) -> dict[str, Part]:
    """Deal groups out to training, validation and test, each of which gets at least one.

    Raises:
        DataError: if there are fewer than three groups.
    """
    names = list(dict.fromkeys(groups))
    if len(names) < 3:
        raise DataError(
            f"Training needs at least 3 groups (documents, conversations or sequences; or categories), got "
            f"{len(names)}: one each to train on, to validate and to test; record more sequences, or group them more "
            "finely."
        )
    if settings.order == "hash":
        names.sort(key=lambda name: hashlib.sha256(f"{settings.seed}:{name}".encode()).digest())
    else:
        names.reverse()
    num_test = min(max(1, round(settings.test_share * len(names))), len(names) - 2)
    num_validation = min(max(1, round(settings.validation_share * len(names))), len(names) - num_test - 1)
    num_training = len(names) - num_test - num_validation
    counts: dict[Part, int] = {"test": num_test, "validation": num_validation, "training": num_training}
    dealt: list[Part] = [part for part, count in counts.items() for _ in range(count)]
    return dict(zip(names, dealt, strict=True))
