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

Options = list[tuple[str, int]]

_FLOW: Options = [
    # To measure the bandwidth gRPC answers every message with a ping: with a thousand sessions that beat once a second,
    # a third of the server's time. A fixed window of this size fills 80 Mbit/s at 100 ms, more than calls need.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", WINDOW_BYTES),
]


def client_options(*, max_message_bytes: int, connect_within_s: float = LONGEST_CONNECT_S) -> Options:
    return [
        *_FLOW,
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


def server_options(*, max_message_bytes: int) -> Options:
    return [
        *_FLOW,
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.keepalive_time_ms", SERVER_KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", SERVER_KEEPALIVE_TIMEOUT_MS),
        ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
        ("grpc.http2.max_ping_strikes", 0),
        # Two coordinators on one port would split the workers between them.
        ("grpc.so_reuseport", 0),
    ]
