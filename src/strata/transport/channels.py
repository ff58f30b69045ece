"""gRPC settings that both ends share."""

from __future__ import annotations

KEEPALIVE_MS = 2_000
KEEPALIVE_TIMEOUT_MS = 2_000
"""A client gives up a connection on which nothing was heard for both together, and makes another."""

SERVER_KEEPALIVE_MS = 60_000
SERVER_KEEPALIVE_TIMEOUT_MS = 60_000
"""A server only cleans up after those who have vanished. It must not be sooner than a lease: a session that ends is
evidence against its workers, and a network that is cut for a while is silence, for which they have the whole lease."""

LONGEST_CONNECT_S = 2.0

WINDOW_BYTES = 1 << 20
"""Of answers on their way to a client that has not read them yet."""
SERVER_WINDOW_BYTES = 1 << 16
"""Of requests on their way to a server, before it has begun to read them: it holds as much of every call, also of those
that it will refuse. Once it reads, gRPC lets through as much as the message needs."""
MAX_PENDING = 256
"""Calls that have arrived and that nobody has looked at yet; beyond this gRPC refuses new ones."""
MAX_STREAMS = 1_000
"""Calls on one connection at once; a client waits with the next one."""
MAX_CONNECTIONS = 20_000
HANDSHAKE_MS = 10_000

Options = list[tuple[str, int]]


def _flow(window_bytes: int) -> Options:
    # To measure the bandwidth gRPC answers every message with a ping: with a thousand sessions that beat once a second,
    # a third of the server's time. A fixed window of 64 KiB fills 5 Mbit/s at 100 ms, more than small calls need.
    return [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", window_bytes)]


def client_options(*, max_message_bytes: int, connect_within_s: float = LONGEST_CONNECT_S) -> Options:
    return [
        *_flow(WINDOW_BYTES),
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.keepalive_time_ms", KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        ("grpc.http2.max_pings_without_data", 0),
        # Reconnecting is paced by the client's own backoff; a cached refusal would only slow it down.
        ("grpc.initial_reconnect_backoff_ms", 50),
        ("grpc.max_reconnect_backoff_ms", 1_000),
        # In spite of its name this is how long one attempt may take; two round trips must fit in, with TLS three.
        ("grpc.min_reconnect_backoff_ms", round(connect_within_s * 1_000)),
        # Two clients of one process do not share a connection: the loss of one says nothing of the other.
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
