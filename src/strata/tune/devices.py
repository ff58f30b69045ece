"""Which GPUs the processes of a trial see.

The trials of a machine run at the same time, and the workers of each count their local ranks from 0: with all GPUs
visible, all trials would use the first one. The GPUs of a machine are therefore divided among its slots. All workers of
a trial see the same GPUs, those of all its slots, and choose by their local rank, as scripts for torchrun do.

Nothing here imports torch or initializes CUDA. Devices that the environment hides stay hidden.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

CUDA = "CUDA_VISIBLE_DEVICES"
HIP = "HIP_VISIBLE_DEVICES"
_DEVICE_FILE = re.compile(r"nvidia\d+")


def device_variables(
    variables: Mapping[str, str], seats: Sequence[int], num_seats: int, count: Callable[[], int]
) -> dict[str, str]:
    """Return the environment variables that show a process of a trial its devices; empty if there are none.

    Args:
        variables: The environment.
        seats: Slots of the machine that the workers of the trial have there, from 0.
        num_seats: All slots of the machine.
        count: Returns the number of GPUs of the machine; called if `variables` does not list them.
    """
    shown = {name: _listed(variables[name]) for name in (CUDA, HIP) if name in variables}
    if not shown:
        shown = {CUDA: [str(number) for number in range(count())]}
    return {name: ",".join(share(devices, seats, num_seats)) for name, devices in shown.items() if devices}


def share(devices: Sequence[str], seats: Sequence[int], num_seats: int) -> list[str]:
    """Return the devices of these seats: each has the same number, and none is in two seats unless there are more seats
    than devices. Then seats take turns.
    """
    per_seat = len(devices) // num_seats
    if per_seat:
        return [device for seat in seats for device in devices[seat * per_seat : (seat + 1) * per_seat]]
    return list(dict.fromkeys(devices[seat % len(devices)] for seat in seats))


def count_gpus(root: Path = Path("/")) -> int:
    """Return the number of NVIDIA GPUs of this machine or container."""
    # A container has device files only of the GPUs that it may use, while /proc may list those of its host. The files
    # may not exist before the first use of a GPU; then /proc is right.
    num_files = len([each for each in _names(root / "dev") if _DEVICE_FILE.fullmatch(each)])
    return num_files or len(_names(root / "proc" / "driver" / "nvidia" / "gpus"))


def _listed(text: str) -> list[str]:
    """Return the devices in a variable: numbers, or names such as `GPU-8932f937` and `MIG-…`. CUDA ignores an entry
    that is empty or negative, and all that follow.
    """
    found: list[str] = []
    for each in text.split(","):
        device = each.strip()
        if not device or device.startswith("-"):
            break
        found.append(device)
    return found


def _names(directory: Path) -> list[str]:
    try:
        return [each.name for each in directory.iterdir()]
    except OSError:
        return []
