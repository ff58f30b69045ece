"""`strata bench checkpoint`: how near to the disk saving and loading come, beside others at equal durability."""

from __future__ import annotations

from strata.bench.frame import Benchmark, Contender, Figure

BENCHMARK = Benchmark(
    name="checkpoint",
    title="Checkpoints",
    contenders=(
        Contender(name="raw disk", module="strata.bench.contenders.checkpoint_raw"),
        Contender(name="strata", module="strata.bench.contenders.checkpoint_strata"),
        Contender(name="torch", module="strata.bench.contenders.checkpoint_torch", venv="peers"),
        Contender(name="safetensors", module="strata.bench.contenders.checkpoint_safetensors", venv="peers"),
    ),
    figures=(
        Figure(
            key="durable_over_raw",
            title="durable save over the raw O_DIRECT ceiling",
            quotient=("durable_ms", "raw_write_ms"),
        ),
        Figure(key="stall_over_memcpy", title="stall over one warm memcpy", quotient=("stall_ms", "memcpy_ms")),
        Figure(
            key="load_over_raw_read",
            title="raw O_DIRECT read over load and verify",
            better="higher",
            quotient=("raw_read_ms", "load_ms"),
        ),
        Figure(
            key="vs_torch_save",
            title="torch.save + fsync over ours",
            better="higher",
            quotient=("torch_save_ms", "durable_ms"),
        ),
        Figure(
            key="vs_safetensors",
            title="safetensors + fsync over ours",
            better="higher",
            quotient=("safetensors_ms", "durable_ms"),
        ),
        Figure(key="vs_dcp", title="torch DCP over ours", better="higher", quotient=("dcp_ms", "durable_ms")),
        Figure(
            key="vs_dcp_async_stall",
            title="stall of DCP's asynchronous save in a process over ours",
            better="higher",
            quotient=("dcp_async_stall_ms", "stall_ms"),
        ),
        Figure(key="durable_ms", title="until it is durable", unit="ms"),
        Figure(key="stall_ms", title="until training goes on", unit="ms"),
        Figure(key="first_stall_ms", title="… of the first save, prepared", unit="ms"),
        Figure(key="load_ms", title="load and verify", unit="ms"),
        Figure(key="peek_ms", title="open for a look", unit="ms"),
        Figure(key="one_of_1000_ms", title="one tensor of 1,000", unit="ms"),
        Figure(key="small_tensors_over_large", title="20,000 small tensors over the same bytes in 16"),
        Figure(key="raw_write_ms", title="raw O_DIRECT write, 4 threads, fsync", unit="ms"),
        Figure(key="raw_read_ms", title="raw O_DIRECT read, 4 threads", unit="ms"),
        Figure(key="memcpy_ms", title="memcpy into warm memory, 2 threads", unit="ms"),
        Figure(key="torch_save_ms", title="torch.save + fsync", unit="ms"),
        Figure(key="dcp_ms", title="torch DCP save, 2 threads, fsync", unit="ms"),
        Figure(key="dcp_async_stall_ms", title="DCP asynchronous, process: stall", unit="ms"),
        Figure(key="safetensors_ms", title="safetensors save_file + fsync", unit="ms"),
    ),
    notes=(
        "1 GiB of fp32 in 16 tensors (STRATA_BENCH_GIB=0.25 for less), in the working directory; medians of 3 saves.",
        "Ours hashes every byte, writes a manifest and commits it; the others' files carry no hash.",
        "The raw ceiling writes and reads the same bytes from and into warm, aligned memory.",
    ),
)
