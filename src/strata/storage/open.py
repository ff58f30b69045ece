"""From a URL to a store."""

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
    """A path or `file://`, `memory://NAME`, `s3://BUCKET/PREFIX`, `gs://…`, `az://CONTAINER/PREFIX`.

    `storage_options` are for object stores: region, endpoint, credentials; left out, these come from the usual places
    (environment, profile, instance).

    Raises:
        ConfigError: Nobody knows the scheme, or the extra for it is not installed.
    """
    scheme, separator, rest = url.partition("://")
    if not separator or scheme == "file":
        if storage_options:
            raise ConfigError("storage_options are for object stores; a path takes none", field="storage_options")
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
    raise ConfigError(f"{scheme}:// is not a kind of store; use a path, or one of {known}", field="storage_path")
