"""gRPC settings that both ends share."""

from __future__ import annotations

KEEPALIVE_MS = 2_000
KEEPALIVE_TIMEOUT_MS = 2_000

Options = list[tuple[str, int]]


def client_options(*, max_message_bytes: int) -> Options:
    return [
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.keepalive_time_ms", KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        ("grpc.http2.max_pings_without_data", 0),
        # Reconnecting is paced by the client's own backoff; a cached refusal would only slow it down.
        ("grpc.initial_reconnect_backoff_ms", 50),
        ("grpc.min_reconnect_backoff_ms", 50),
        ("grpc.max_reconnect_backoff_ms", 1_000),
        # Two clients of one process do not share a connection: the loss of one says nothing of the other.
        ("grpc.use_local_subchannel_pool", 1),
    ]


def server_options(*, max_message_bytes: int) -> Options:
    return [
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.keepalive_time_ms", KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
        ("grpc.http2.max_ping_strikes", 0),
        # Two coordinators on one port would split the workers between them.
        ("grpc.so_reuseport", 0),
    ]
