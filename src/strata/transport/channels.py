"""gRPC options of clients and servers."""

from __future__ import annotations

KEEPALIVE_MS = 2_000
KEEPALIVE_TIMEOUT_MS = 2_000
"""A client drops a connection that was silent for the sum of the two, and reconnects."""

SERVER_KEEPALIVE_MS = 60_000
SERVER_KEEPALIVE_TIMEOUT_MS = 60_000
"""A server uses keepalive only to clean up after clients that vanished. The sum must exceed a lease: a closed session
makes its workers suspect, whereas a worker behind an interrupted network is only silent and keeps its whole lease."""

LONGEST_CONNECT_S = 2.0

WINDOW_BYTES = 1 << 20
"""Flow-control window for answers that the client has not read yet."""
SERVER_WINDOW_BYTES = 1 << 16
"""Flow-control window for requests that the server has not begun to read. The server may buffer this much for every
call, including calls that it will reject. Once it reads, gRPC extends the window to the size of the message."""
MAX_PENDING = 256
"""Received calls that the server has not accepted yet; gRPC rejects further ones."""
MAX_STREAMS = 1_000
"""Concurrent calls per connection; the client delays further ones."""
MAX_CONNECTIONS = 20_000
HANDSHAKE_MS = 10_000

Options = list[tuple[str, int]]


def _flow(window_bytes: int) -> Options:
    # To estimate bandwidth, gRPC answers every message with a ping. With a thousand sessions and one heartbeat per
    # second each, that takes a third of the server's time. A fixed window of 64 KiB sustains 5 Mbit/s at 100 ms, more
    # than small calls need.
    return [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", window_bytes)]


def client_options(*, max_message_bytes: int, connect_within_s: float = LONGEST_CONNECT_S) -> Options:
    return [
        *_flow(WINDOW_BYTES),
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.keepalive_time_ms", KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        ("grpc.http2.max_pings_without_data", 0),
        # The client has its own backoff; a cached connection failure would only delay it.
        ("grpc.initial_reconnect_backoff_ms", 50),
        ("grpc.max_reconnect_backoff_ms", 1_000),
        # Despite its name, this bounds one connection attempt. It must allow two round trips, three with TLS.
        ("grpc.min_reconnect_backoff_ms", round(connect_within_s * 1_000)),
        # Clients of one process do not share a connection, so that losing one does not affect the others.
        ("grpc.use_local_subchannel_pool", 1),
    ]


def server_options(*, max_message_bytes: int, max_request_bytes: int) -> Options:
    return [
        *_flow(SERVER_WINDOW_BYTES),
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.max_receive_message_length", max_request_bytes),
        ("grpc.max_concurrent_streams", MAX_STREAMS),
        ("grpc.max_allowed_incoming_connections", MAX_CONNECTIONS),
        ("grpc.server.max_pending_requests", MAX_PENDING),
        ("grpc.server.max_pending_requests_hard_limit", 2 * MAX_PENDING),
        ("grpc.server_handshake_timeout_ms", HANDSHAKE_MS),
        ("grpc.keepalive_time_ms", SERVER_KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", SERVER_KEEPALIVE_TIMEOUT_MS),
        ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
        ("grpc.http2.max_ping_strikes", 0),
        # Two coordinators on one port would split the workers between them.
        ("grpc.so_reuseport", 0),
    ]
