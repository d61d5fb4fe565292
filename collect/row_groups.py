"""Single row groups of a trace's shards, for readers that come back to a row. Knows Parquet, no headers or models.

Readers that go through a trace once take `read_shard`. The arrays of a group's rows are views on what was read for it.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from .errors import TraceError
from .sequence import SequenceRouting, columns_of
from .shard import _check_schema, _refuse, _rows
from .topology import MoeTopology


def row_group_sizes(path: Path) -> list[int]:
    """Give the number of rows of each row group of a shard.

    Raises:
        TraceError: if the shard is damaged, or its footer contradicts itself.
    """
    try:
        with pq.ParquetFile(path) as file:
            footer = file.metadata
            sizes = [footer.row_group(group).num_rows for group in range(file.num_row_groups)]
    except (pa.ArrowException, OSError) as error:
        raise _damaged(path, str(error)) from error
    if sum(sizes) != footer.num_rows:
        raise _damaged(path, f"it has {sum(sizes)} rows, its footer says {footer.num_rows}")
    return sizes


def read_row_group(
    path: Path, group: int, topology: MoeTopology, *, first: int = 0, leave_out: Collection[str] = ()
) -> list[SequenceRouting]:
    """Read the rows of one row group.

    Args:
        path: of the shard.
        group: number of the row group.
        topology: of the trace.
        first: number of the group's first row in the shard, for error messages.
        leave_out: optional columns that are not read; rows have None in their place.

    Raises:
        TraceError: if the shard is damaged or lacks a column, or a row does not fit the topology.
    """
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            _check_schema(path, file.schema_arrow)
            names = [name for name in file.schema_arrow.names if name not in leave_out]
            table = file.read_row_group(group, columns=names)
        return list(_rows(table, columns_of(topology), first, _refuse(path), strict=True))
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise _damaged(path, str(error)) from error


def _damaged(path: Path, reason: str) -> TraceError:
    return TraceError(f"{path} is damaged ({reason}); delete this shard or record the trace again.")
