"""Which user of this machine has opened a connection to loopback.

A TCP port on loopback is open to every user of the machine, unlike a Unix socket in a private directory. The kernel
lists the owner of each socket in `/proc/net/tcp`; the line whose local address is the remote end of our connection is
the client's. Only a socket that is still connected counts: the kernel lists closed ones as owned by root.
"""

from __future__ import annotations

import ipaddress
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

ROOT = 0
_ESTABLISHED = "01"
_TABLES = ("/proc/net/tcp", "/proc/net/tcp6")
MAX_LINES = 200_000
"""Lines of a table that are read; a machine with more connections refuses private ones."""


def is_own_user(client: tuple[str, int] | None, server: tuple[str, int | None] | None) -> bool:
    """Whether this user, or root, has opened the connection. False if it cannot be found out."""
    if client is None or server is None or server[1] is None:
        return False
    owner = find_owner(_lines(), client=client, server=(server[0], server[1]))
    return owner in (os.geteuid(), ROOT)


def find_owner(lines: Iterable[str], *, client: tuple[str, int], server: tuple[str, int]) -> int | None:
    """Return the user id of the client's end of a connection, from the lines of the kernel's tables."""
    ours, theirs = _addresses(*server), _addresses(*client)
    for line in lines:
        words = line.split(maxsplit=8)
        if len(words) > 7 and words[3] == _ESTABLISHED and words[1] in theirs and words[2] in ours:
            return int(words[7])
    return None


def _lines() -> Iterable[str]:
    for path in _TABLES:
        try:
            with Path(path).open(encoding="ascii") as table:
                for _, line in zip(range(MAX_LINES), table, strict=False):
                    yield line
        except OSError:  # no IPv6, or not Linux
            continue


def _addresses(host: str, port: int) -> set[str]:
    """Return an address as the tables show it: hexadecimal, in words of the machine's byte order. A client may show an
    IPv4 address as one of IPv6.
    """
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return set()
    packed = [address.packed]
    if address.version == 4:
        packed.append(b"\x00" * 10 + b"\xff\xff" + address.packed)
    return {f"{_in_words(each)}:{port:04X}" for each in packed}


def _in_words(packed: bytes) -> str:
    words = (packed[begin : begin + 4] for begin in range(0, len(packed), 4))
    return "".join(f"{int.from_bytes(word, sys.byteorder):08X}" for word in words)
