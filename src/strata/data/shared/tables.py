"""Tables in shared memory: written once as an Arrow IPC stream, and read without a copy."""

from __future__ import annotations

import os

import pyarrow as pa


def stream_bytes(table: pa.Table) -> int:
    """Return the size of the stream that `write_table` writes."""
    counted = pa.MockOutputStream()
    with pa.ipc.new_stream(counted, table.schema) as stream:
        stream.write_table(table)
    return int(counted.size())


def write_table(fd: int, table: pa.Table) -> None:
    """Write a table to the start of a new file, whose descriptor stays open."""
    with os.fdopen(os.dup(fd), "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table)


def read_table(memory: pa.Buffer) -> pa.Table:
    """Return the table of a stream without a copy. The memory lives as long as any array of it."""
    return pa.ipc.open_stream(memory).read_all()
