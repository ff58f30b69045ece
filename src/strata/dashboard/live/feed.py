"""The ring of live messages: serialised once, read by every client at its own pace.

A client is a number, the last message that it has, so a slow client costs no memory. If the ring has dropped messages
that a client needs, `since` says so, and the client loads everything again. Messages that replace earlier ones have a
key: of those that a client has not got yet, only the newest is sent.
"""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import NamedTuple

MAX_MESSAGES = 4_096
MAX_BYTES = 4 * 1024 * 1024
MAX_CURSOR_LENGTH = 64


class Message(NamedTuple):
    seq: int
    key: str
    """A later message of the same key replaces this one; empty if nothing does."""
    frame: bytes


class Feed:
    """The newest messages. `boot` distinguishes this process from its predecessor, whose numbers mean other things."""

    def __init__(self, boot: str, *, max_messages: int = MAX_MESSAGES, max_bytes: int = MAX_BYTES) -> None:
        self._boot = boot
        self._max_messages = max_messages
        self._max_bytes = max_bytes
        self._messages: deque[Message] = deque()
        self._num_bytes = 0
        self.last_seq = 0

    @property
    def cursor(self) -> str:
        return self.cursor_at(self.last_seq)

    def cursor_at(self, seq: int) -> str:
        return f"{self._boot}-{seq}"

    def publish(self, event: str, data: bytes, key: str = "") -> None:
        """Append a message; `data` is JSON, which contains no newline."""
        self.last_seq += 1
        message = Message(self.last_seq, key, frame(event, data, self.cursor))
        self._messages.append(message)
        self._num_bytes += len(message.frame)
        while len(self._messages) > self._max_messages or self._num_bytes > self._max_bytes:
            self._num_bytes -= len(self._messages.popleft().frame)

    def seq_of(self, cursor: str) -> int | None:
        """Return the number in a cursor, or None if it is not one of this process."""
        boot, _, number = cursor.rpartition("-")
        if boot != self._boot or not (number.isascii() and number.isdecimal()) or len(cursor) > MAX_CURSOR_LENGTH:
            return None
        seq = int(number)
        return seq if seq <= self.last_seq else None

    def has_since(self, seq: int) -> bool:
        """Whether nothing after this message has been dropped."""
        return seq >= self.last_seq - len(self._messages)

    def since(self, seq: int) -> list[Message]:
        """Return the messages after this one, without those that later ones replace."""
        first = max(seq - (self.last_seq - len(self._messages)), 0)
        return newest_by_key(list(islice(self._messages, first, None)))


def newest_by_key(messages: list[Message]) -> list[Message]:
    """Drop messages that a later one of the same key replaces; the order stays."""
    seen: set[str] = set()
    kept = []
    for message in reversed(messages):
        if message.key in seen:
            continue
        if message.key:
            seen.add(message.key)
        kept.append(message)
    return kept[::-1]


def frame(event: str, data: bytes, cursor: str) -> bytes:
    """Return a server-sent event."""
    assert b"\n" not in data
    return b"event: %b\nid: %b\ndata: %b\n\n" % (event.encode(), cursor.encode(), data)
