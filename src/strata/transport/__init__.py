"""Connections between processes: addresses, gRPC channels, frames over plain sockets, tokens and TLS.

Knows nothing of jobs or workers. Imports no other package of Strata except the ground modules.
"""

import os

os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")  # see `forks`
