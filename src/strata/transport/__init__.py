"""Connections between processes: addresses, gRPC channels, frames over plain sockets, retries, tokens and TLS.

Knows nothing of jobs or workers. Imports no other package of Strata, only the small modules at the bottom (`errors`,
`lifecycle`, `scratch`).
"""

import os

os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")  # see `forks`
