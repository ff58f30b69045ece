"""Feature columns: declared by name, fitted in one pass over the data, encoded the same in training and in serving.

Users declare columns (`columns`), and `Features.fit` (`features`) reads the data once: `scan` drives the decode
threads of `strata.data`, and a fitter per column (`fitters`) counts categories (`counts`) or sums numbers (`moments`).
The result is a fitted column each (`encoding`), with a map from categories to ids (`vocabulary`, `hashing`), which
encodes Arrow batches in the loader's threads. `values` defines what a category and a number is, `field` what a model
sees. `portable` is the same encoding with torch alone, copied into exported models; property tests compare the two.

May import `strata.data` and the modules below it, never the loop, the models or another part of the trainer. `field`,
`columns` and `portable` do without pyarrow, so a name is imported when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from strata.trainer.features.columns import DenseFeat as DenseFeat
    from strata.trainer.features.columns import SparseFeat as SparseFeat
    from strata.trainer.features.columns import VarLenFeat as VarLenFeat
    from strata.trainer.features.features import Features as Features
    from strata.trainer.features.field import Field as Field
    from strata.trainer.features.field import auto_embedding_dim as auto_embedding_dim
    from strata.trainer.features.portable import PortableEncoder as PortableEncoder

_HOMES = {
    "columns": ("DenseFeat", "SparseFeat", "VarLenFeat"),
    "features": ("Features",),
    "field": ("Field", "auto_embedding_dim"),
    "portable": ("PortableEncoder",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [*sorted(_HOME_OF)]  # noqa: PLE0604 - they are strings


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'strata.trainer.features' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"strata.trainer.features.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
