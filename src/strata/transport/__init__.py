"""How processes reach each other: addresses and gRPC channels."""

import os

os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")  # see `forks`
