"""Clients of the coordinator: `CoordinatorClient` for blocking code, `AsyncCoordinatorClient` for asyncio.

Both keep one session that survives lost connections (`_link`). `_worker` is a registered worker: it collects reports
and sends heartbeats. Imports `transport`, `wire` and, for its types, `state`; never `serve`.
"""

from strata.coordinator.client._async import AsyncCoordinatorClient
from strata.coordinator.client._config import ClientConfig
from strata.coordinator.client._sync import CoordinatorClient, Worker
from strata.coordinator.client._worker import AsyncWorker

__all__ = ["AsyncCoordinatorClient", "AsyncWorker", "ClientConfig", "CoordinatorClient", "Worker"]
