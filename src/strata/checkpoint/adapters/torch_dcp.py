"""torch.distributed.checkpoint on our store: `dcp.save`, `dcp.async_save` and `dcp.load` as ever, and what lies there
is a checkpoint like any other, which `CheckpointManager` and `strata checkpoints` read.

    dcp.save(state, storage_writer=StrataStorageWriter("s3://bucket/run", step=5000))
    dcp.load(state, storage_reader=StrataStorageReader("s3://bucket/run"))

Each rank writes one file; the coordinator chooses the id, gathers what was written and puts the manifest. DCP pickles
what is not a tensor; here nothing is: the object itself is asked for and stored as structure and tensors, and one that
cannot be stored so is refused by its name. For loading, DCP's planner wants such a pickle back. It is made in memory
from what was read, so nothing that comes from the disk is ever unpickled.
"""

from __future__ import annotations

from strata.checkpoint.adapters.dcp_reader import StrataStorageReader
from strata.checkpoint.adapters.dcp_writer import StrataStorageWriter

__all__ = ["StrataStorageReader", "StrataStorageWriter"]
