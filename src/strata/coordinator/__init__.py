"""The coordinator: who is here, what is theirs, and what has been agreed on."""

import strata.transport  # noqa: F401 - it switches off gRPC's handlers for forks, which must be done before gRPC is loaded
