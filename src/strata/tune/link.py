"""The connection from a process of a trial to the driver.

It has no thread: the process sends a report and goes on, and reads what has come before its next one. A broken
connection is opened again, and what the driver has not answered is sent again.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
import time
from collections import deque
from typing import TYPE_CHECKING

import msgspec
import tenacity

from strata.errors import StrataError
from strata.transport import sockets
from strata.transport.addresses import parse_address
from strata.transport.backoff import pauses
from strata.tune import messages as m

if TYPE_CHECKING:
    from collections.abc import Callable

    from strata.tune.state.events import Values

ANSWER_S = 60.0
"""Longest wait for an answer, with new connections; then the process gives up."""
CONNECT_S = 10.0
"""Longest wait for one connection, with its handshake."""
FIRST_RETRY_S, RETRY_S = 0.01, 0.2
"""Longest pause after the first try to connect, and after any."""
PEER_GONE_S = 20.0
"""Time after which a connection to a machine that vanished counts as broken."""
_CHUNK_BYTES = 64 << 10


_Sent = m.Report | m.Settle | m.Result | m.Failure


class DriverLost(StrataError):
    """The driver does not answer: it, its machine or the network is gone."""


class Link:
    """Calls may come from several threads."""

    def __init__(self, endpoint: m.Endpoint, hello: m.Hello, *, answer_s: float = ANSWER_S) -> None:
        self._endpoint = endpoint
        self._hello = msgspec.structs.replace(hello, token=endpoint.token)
        self._answer_s = answer_s
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._received = bytearray()
        self._open: deque[_Sent] = deque()
        """Messages without an answer: at most the last report and one more."""
        self._is_settled = True
        """No report was sent since the last `settle`."""
        self._number = 0
        self._order: m.Order | None = None
        self._stop: m.StopTrial | None = None

    def begin(self) -> m.Order | None:
        """Connect and return what to run; None if the trial was stopped before it began.

        Raises:
            DriverLost: The driver does not answer.
        """
        with self._lock:
            self._receive_until(lambda: self._order is not None or self._stop is not None)
            return None if self._stop is not None else self._order

    def report(self, step: int, values: Values) -> None:
        self._send(lambda lease, number: m.Report(lease=lease, number=number, step=step, values=values))
        self._is_settled = False

    def settle(self) -> None:
        """Return when all reports survive a crash of the driver and of its machine.

        Raises:
            DriverLost: The driver does not answer.
        """
        if self._is_settled:
            return
        self._send(lambda lease, number: m.Settle(lease=lease, number=number))
        self._flush()
        self._is_settled = True

    def finish(self, values: Values | None) -> None:
        """Report the result, and return when the driver has it.

        Raises:
            DriverLost: The driver does not answer.
        """
        self._send(lambda lease, number: m.Result(lease=lease, number=number, values=values))
        self._flush()

    def fail(self, reason: str) -> None:
        """Report a failure, and return when the driver has it, or does not answer."""
        with contextlib.suppress(DriverLost):
            self._send(lambda lease, number: m.Failure(lease=lease, number=number, reason=reason))
            self._flush()

    def answer(self) -> m.StopTrial | None:
        """Wait until the last report is answered; return the request to stop, if there is one.

        Raises:
            DriverLost: The driver does not answer.
        """
        with self._lock:
            self._take(0.0)
            self._receive_until(lambda: self._stop is not None or not self._open)
            return self._stop

    def close(self) -> None:
        with self._lock:
            self._disconnect()

    # -- sending and receiving -------------------------------------------------------------------------------------

    def _send(self, make: Callable[[int, int], _Sent]) -> None:
        """Send what `make` returns for the lease and the next number."""
        with self._lock:
            assert self._order is not None
            self._number += 1
            message = make(self._order.lease, self._number)
            self._open.append(message)
            if self._socket is not None:
                self._transmit(m.encode(message))

    def _flush(self) -> None:
        with self._lock:
            self._receive_until(lambda: not self._open)

    def _receive_until(self, is_done: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + self._answer_s
        while not is_done():
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise DriverLost(
                    f"the driver of the study at {self._endpoint.address} has not answered for {self._answer_s:g} s"
                )
            if self._socket is None:
                self._connect(left_s)
            else:
                self._take(left_s)

    def _connect(self, left_s: float) -> None:
        """Connect, and send what has no answer."""
        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(OSError),
            wait=pauses(FIRST_RETRY_S, RETRY_S),
            stop=tenacity.stop_after_delay(left_s),
            reraise=True,
        )
        try:
            self._socket = retrying(self._connected)
        except OSError as error:
            raise DriverLost(
                f"cannot reach the driver of the study at {self._endpoint.address} for {self._answer_s:g} s ({error})"
            ) from error
        self._received.clear()
        self._transmit(b"".join(map(m.encode, [self._hello, *self._open])))

    def _connected(self) -> socket.socket:
        address = parse_address(self._endpoint.address, field="address")
        with contextlib.ExitStack() as unless_connected:
            if address.path:
                plain = unless_connected.enter_context(socket.socket(socket.AF_UNIX))
                plain.settimeout(CONNECT_S)
                plain.connect(address.path)
                unless_connected.pop_all()
                return plain
            plain = unless_connected.enter_context(socket.create_connection((address.host, address.port), CONNECT_S))
            sockets.tune(plain, gone_after_s=PEER_GONE_S)
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.minimum_version = ssl.TLSVersion.TLSv1_2
            context.load_verify_locations(cadata=self._endpoint.ca)
            secured = context.wrap_socket(plain, server_hostname=address.host)
            unless_connected.pop_all()
            return secured

    def _transmit(self, data: bytes) -> None:
        assert self._socket is not None
        try:
            self._socket.settimeout(CONNECT_S)
            self._socket.sendall(data)
        except OSError:
            self._disconnect()

    def _take(self, timeout_s: float) -> None:
        """Handle what has come, and wait for something if nothing has."""
        if self._socket is None:
            return
        try:
            self._socket.settimeout(timeout_s)
            data = self._socket.recv(_CHUNK_BYTES)
        except (BlockingIOError, TimeoutError, ssl.SSLWantReadError):
            return
        except OSError:
            data = b""
        if not data:
            self._disconnect()
            return
        self._received += data
        *lines, rest = bytes(self._received).split(b"\n")
        if len(rest) > m.MAX_BYTES:
            self._disconnect()
            return
        self._received = bytearray(rest)
        for line in lines:
            self._handle(m.to_trial.decode(line))

    def _handle(self, message: m.ToTrial) -> None:
        match message:
            case m.Order():
                self._order = self._order or message
            case m.StopTrial():
                self._stop = message
            case m.Answer(number=number):
                while self._open and self._open[0].number <= number:
                    self._open.popleft()

    def _disconnect(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
