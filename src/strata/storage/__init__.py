"""Places where bytes are kept under names: a directory, a bucket, memory.

`open_store(url)` gives the one that a URL names; what each of them promises stands in `base.Store`.
"""

from __future__ import annotations

from strata.storage.base import Listed, Store, Watch
from strata.storage.open import open_store

__all__ = ["Listed", "Store", "Watch", "open_store"]
