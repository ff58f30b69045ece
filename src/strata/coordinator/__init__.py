"""The coordinator: membership, shard assignment, barriers and checkpoint agreement of jobs.

`state` decides (pure), `journal` makes decisions durable, `serve` and `http` answer callers, `client` calls, and
`relay` serves the workers of one node. The modules here are the server process, the embedded coordinator and what the
folders share (`config`, `timeouts`, `wire`). Imports `transport`, never `data`, `checkpoint` or anything above.
"""

import strata.transport  # noqa: F401 - disables gRPC's fork handlers before gRPC is loaded
