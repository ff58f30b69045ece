"""`strata bench coordinator`: how many calls a coordinator on one core carries out, beside a bare gRPC echo."""

from __future__ import annotations

from strata.bench.frame import Benchmark, Contender, Figure

BENCHMARK = Benchmark(
    name="coordinator",
    title="Coordinator",
    contenders=(
        Contender(name="strata", module="strata.bench.contenders.coordinator_strata"),
        Contender(name="grpc.aio echo", module="strata.bench.contenders.coordinator_echo"),
        Contender(name="barriers", module="strata.bench.contenders.coordinator_barrier"),
        Contender(name="TCPStore", module="strata.bench.contenders.coordinator_tcpstore", venv="peers"),
        Contender(name="1,000 idle workers", module="strata.bench.contenders.coordinator_idle"),
        Contender(name="detection", module="strata.bench.contenders.coordinator_detect"),
    ),
    figures=(
        Figure(
            key="requests_per_s",
            title="calls through 4 sessions",
            unit="1/s",
            better="higher",
            peers=("raw_unary_echo_per_s", "raw_stream_echo_per_s", "raw_framed_echo_per_s"),
        ),
        Figure(
            key="unary_requests_per_s",
            title="unary heartbeats",
            unit="1/s",
            better="higher",
            peers=("raw_unary_echo_per_s",),
        ),
        Figure(
            key="barrier_100_p99_ms",
            title="barrier of 100 on 13 nodes, p99",
            unit="ms",
            peers=("tcpstore_barrier_100_p99_ms",),
        ),
        Figure(key="barrier_100_p50_ms", title="… p50", unit="ms", peers=("tcpstore_barrier_100_p50_ms",)),
        Figure(key="barrier_100_direct_p99_ms", title="barrier of 100, a session each, p99", unit="ms"),
        Figure(key="tcpstore_barrier_100_p99_ms", title="TCPStore barrier of 100, p99", unit="ms"),
        Figure(key="tcpstore_barrier_100_p50_ms", title="… p50", unit="ms"),
        Figure(key="idle_1000_cpu_fraction", title="of a core for 1,000 workers that beat each second"),
        Figure(key="idle_1000_rss_mb", title="memory with 1,000 workers", unit="MB"),
        Figure(key="detect_closed_s", title="from kill -9 until the others know", unit="s"),
        Figure(key="detect_silent_s", title="from SIGSTOP until the others know (lease 5 s)", unit="s"),
        Figure(key="session_server_cpu_fraction", title="of the server's core, during the sessions"),
        Figure(key="session_cpu_us_per_request", title="server CPU a call, in sessions", unit="µs"),
        Figure(key="server_rss_mb", title="server memory at the end", unit="MB"),
        Figure(key="raw_unary_echo_per_s", title="raw echo, unary", unit="1/s", better="higher"),
        Figure(key="raw_stream_echo_per_s", title="raw echo, one message a frame", unit="1/s", better="higher"),
        Figure(key="raw_framed_echo_per_s", title="raw echo, 64 messages a frame", unit="1/s", better="higher"),
    ),
    notes=(
        "Barriers: ours are durable before they are told (one commit each); TCPStore's are kept in memory.",
        "Idle workers: a session each, from one client process.",
        "Server and client each on a core of their own, over loopback TCP; 100 workers, journal on disk (fsync).",
        "Sessions: 90 % heartbeats, 9 % shard acks, durable before they are answered, 1 % others; 64 calls a frame.",
    ),
)
