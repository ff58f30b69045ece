"""Stores keep bytes under keys: in a local directory, an object store or memory.

`open_store(url)` opens the store of a URL; `base.Store` is the port that each implements. This package imports nothing
above it, raises `StorageError` only, and knows nothing of checkpoints or datasets.
"""

from __future__ import annotations

from strata.storage.base import Listed, Store, Watch
from strata.storage.open import open_store

__all__ = ["Listed", "Store", "Watch", "open_store"]
