"""Open the store that a URL names."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from strata.errors import ConfigError
from strata.storage.local import LocalStore
from strata.storage.memory import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Mapping

    from strata.storage.base import Store

OBJECT_SCHEMES = ("s3", "s3a", "gs", "az", "abfs", "abfss", "azure")
_memory: dict[str, MemoryStore] = {}


def open_store(url: str, storage_options: Mapping[str, Any] | None = None) -> Store:
    """Open a path, `file://`, `memory://NAME`, `s3://BUCKET/PREFIX`, `gs://…` or `az://CONTAINER/PREFIX`.

    `storage_options` configure object stores: region, endpoint, credentials. Options that are left out come from the
    environment, the AWS profile or the identity of the machine.

    Raises:
        ConfigError: The scheme is unknown, or the extra that it needs is not installed.
    """
    scheme, separator, rest = url.partition("://")
    if not separator or scheme == "file":
        if storage_options:
            raise ConfigError(
                "storage_options configure object stores; leave them out for a path", field="storage_options"
            )
        return LocalStore(unquote(urlsplit(url).path) if separator else url)
    if scheme == "memory":
        return _memory.setdefault(rest, MemoryStore(rest))
    if scheme in OBJECT_SCHEMES:
        try:
            module = importlib.import_module("strata.storage.objects")
        except ImportError as error:
            raise ConfigError(
                f"{scheme}:// needs the package {error.name}; install it with: pip install 'strata-runtime[cloud]'",
                field="storage_path",
            ) from error
        store: Store = module.ObjectStore(url, storage_options or {})
        return store
    known = ", ".join(("file", "memory", *OBJECT_SCHEMES))
    raise ConfigError(f"{scheme}:// is an unknown scheme; use a path or one of {known}", field="storage_path")
