"""States of a process's random generators, of Python, NumPy and torch, as plain data for checkpoints.

Only generators of imported libraries count. Each rank saves its own states. A rank that did not exist when they were
saved derives its states from those of rank 0, so that it repeats no rank's numbers and every run derives the same.
"""

from __future__ import annotations

import random
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from strata.errors import CheckpointInvalid

if TYPE_CHECKING:
    from collections.abc import Mapping

_PYTHON_VERSION = 3
"""Version of `random.getstate()`."""


def take() -> dict[str, Any]:
    """Return the current states."""
    version, words, gauss = random.getstate()
    states: dict[str, Any] = {
        "python": {"version": version, "words": np.array(words, np.uint32), "gauss": gauss},
        "numpy": np.random.get_state(legacy=False),
    }
    torch = sys.modules.get("torch")
    if torch is not None:
        states["torch"] = torch.get_rng_state()
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            states["cuda"] = torch.cuda.get_rng_state_all()
    return states


def put(states: Mapping[str, Any]) -> None:
    """Restore states.

    Raises:
        CheckpointInvalid: They are not what `take` returned.
    """
    try:
        python = states["python"]
        words = tuple(int(word) for word in np.asarray(python["words"]))
        random.setstate((int(python["version"]), words, python["gauss"]))
        np.random.set_state(states["numpy"])
        torch = sys.modules.get("torch")
        if torch is not None and "torch" in states:
            torch.set_rng_state(_bytes(torch, states["torch"]))
            if "cuda" in states and torch.cuda.device_count() == len(states["cuda"]):
                torch.cuda.set_rng_state_all([_bytes(torch, each) for each in states["cuda"]])
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointInvalid(
            f"cannot restore the states of the random generators ({error}); restore with generators=False to continue "
            "without them"
        ) from error


def derive(states: Mapping[str, Any], rank: int) -> None:
    """Set the states of a rank without saved ones, from another rank's states and its own number."""
    words = np.ascontiguousarray(np.asarray(states["python"]["words"]), np.uint32)
    seed = xxhash.xxh3_64_intdigest(words.tobytes() + rank.to_bytes(8, "little"))
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.manual_seed(seed)


def _bytes(torch: Any, state: Any) -> Any:
    return torch.as_tensor(state, dtype=torch.uint8).cpu()
