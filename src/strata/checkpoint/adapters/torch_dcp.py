"""Storage for torch.distributed.checkpoint: `dcp.save`, `dcp.async_save` and `dcp.load` with Strata checkpoints.

`CheckpointManager` and `strata checkpoints` read these checkpoints like any other:

    dcp.save(state, storage_writer=StrataStorageWriter("s3://bucket/run", step=5000))
    dcp.load(state, storage_reader=StrataStorageReader("s3://bucket/run"))

Each rank writes one file. DCP's coordinator rank chooses the id, gathers what was written and commits. DCP pickles
objects that are not tensors. The adapter does not: it stores the object itself as structure and tensors, and rejects by
name what cannot be stored this way. For loading, DCP's planner expects a pickle; it is created in memory from what was
read, so nothing from disk is ever unpickled.
"""

from __future__ import annotations

from strata.checkpoint.adapters.dcp_reader import StrataStorageReader
from strata.checkpoint.adapters.dcp_writer import StrataStorageWriter

__all__ = ["StrataStorageReader", "StrataStorageWriter"]
