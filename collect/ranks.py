"""The processes of one recording run, as torchrun starts them. Knows torch.distributed; knows no models or traces.

One process alone is rank 0 of 1 and talks to nobody. Several meet by gloo at the address that torchrun has put into the
environment; they exchange a few numbers and never tensors of the model. A process that dies closes its connections, so
that the others fail within moments instead of waiting.
"""

from __future__ import annotations

import os
from datetime import timedelta
from types import TracebackType
from typing import Any

from .errors import ForegateError, SettingError

PATIENCE = timedelta(days=7)  # the slowest rank may take that much longer than the fastest
MEETING = timedelta(minutes=5)  # until all processes have started


class Ranks:
    """Meet the other processes of a run; leaving the block parts from them.

        with Ranks.from_environment() as ranks:
            ranks.barrier()

    Args:
        rank: of this process.
        size: number of processes.
        local_rank: number of this process on its machine, which is the number of its device.
    """

    def __init__(self, rank: int = 0, size: int = 1, local_rank: int = 0) -> None:
        if not 0 <= rank < size or local_rank < 0:
            raise SettingError(
                f"RANK must lie in 0..{size - 1} (WORLD_SIZE) and LOCAL_RANK be 0 or more, got {rank} and "
                f"{local_rank}; start the processes with torchrun."
            )
        self.rank, self.size, self.local_rank = rank, size, local_rank
        self._group: Any = None
        self._owned = False

    @classmethod
    def from_environment(cls) -> Ranks:
        """Read what torchrun has put into the environment; without it this process is alone."""
        if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
            return cls()
        values = {name: os.environ.get(name, "0") for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
        for name, value in values.items():
            if not value.isdigit():
                raise SettingError(f"{name} must be a number, got {value!r}; start the processes with torchrun.")
        rank, size, local_rank = map(int, values.values())
        return cls(rank, size, local_rank)

    def __enter__(self) -> Ranks:
        if self.size > 1:
            import torch.distributed as dist

            try:
                self._owned = not dist.is_initialized()
                if self._owned:
                    dist.init_process_group("gloo", rank=self.rank, world_size=self.size, timeout=MEETING)
                self._group = dist.new_group(backend="gloo", timeout=PATIENCE)
            except (RuntimeError, ValueError) as error:
                raise ForegateError(
                    f"Rank {self.rank} did not meet the other {self.size - 1} processes ({_first_line(error)}); start "
                    "all of them with torchrun."
                ) from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._group is not None:
            import torch.distributed as dist

            self._group = None
            if self._owned:
                dist.destroy_process_group()

    def gather(self, value: Any) -> list[Any]:
        """Give every rank's value, in rank order, to all; a barrier as well.

        Raises:
            ForegateError: if another process is gone.
        """
        if self._group is None:
            return [value]
        import torch
        import torch.distributed as dist

        own = torch.tensor(value, dtype=torch.int64)
        values = [torch.zeros_like(own) for _ in range(self.size)]
        try:
            dist.all_gather(values, own, group=self._group)
        except RuntimeError as error:
            raise ForegateError(
                f"Another of the {self.size} processes has ended before its time ({_first_line(error)}); see its "
                "message, then run again with --resume."
            ) from error
        return [item.tolist() for item in values]

    def barrier(self) -> None:
        """Wait until every rank has come here.

        Raises:
            ForegateError: if another process is gone.
        """
        self.gather([self.rank])


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
