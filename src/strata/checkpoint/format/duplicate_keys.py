"""JSON objects that have a key twice, which are refused.

Most readers take the last of the two values, some the first: the same bytes would be two different checkpoints, both
with the right hash. Nothing of ours writes such an object.
"""

from __future__ import annotations

import json
from typing import Any

from strata.errors import CheckpointInvalid


def check(data: bytes, *, written: bytes, file: str) -> None:
    """`written` is what our encoder makes of what `data` was taken for. If they are the same bytes, as they nearly
    always are, there is nothing to look for.

    Raises:
        CheckpointInvalid: An object in `data` has a key twice.
    """
    if data == written:
        return

    def unique(pairs: list[tuple[str, Any]]) -> None:
        keys = [key for key, _ in pairs]
        if len(set(keys)) != len(keys):
            twice = next(key for i, key in enumerate(keys) if key in keys[:i])
            raise CheckpointInvalid(f"{file}: the key {twice[:200]!r} is there twice in one object")

    try:
        json.loads(data, object_pairs_hook=unique, parse_int=len, parse_float=len)  # numbers are not looked at
    except (ValueError, RecursionError) as error:  # of JSON that another reader has understood
        raise CheckpointInvalid(f"{file} is not plain JSON: {error}") from None
