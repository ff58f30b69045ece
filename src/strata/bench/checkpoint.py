"""`strata bench checkpoint`: how near to the disk saving and loading come, beside others at equal durability."""

from __future__ import annotations

from strata.bench.frame import Benchmark, Contender, Figure, Setting

TIMEOUT_S = 1_200.0
"""For a contender that writes 1 GiB a dozen times and reads it some more, on a disk that does 50 MB/s for a while."""


def contender(name: str, module: str) -> Contender:
    return Contender(
        name=name, module=f"strata.bench.contenders.checkpoint_{module}", timeout_s=TIMEOUT_S, usual_s=50.0
    )


def peer(name: str, module: str) -> Contender:
    return Contender(
        name=name,
        module=f"strata.bench.contenders.checkpoint_{module}",
        venv="peers",
        timeout_s=TIMEOUT_S,
        usual_s=50.0,
    )


RATIOS = (
    Figure(
        key="durable_over_raw",
        title="save until durable, over the raw O_DIRECT write",
        quotient=("durable_ms", "raw_write_ms"),
    ),
    Figure(
        key="stall_over_memcpy",
        title="stall of the trainer, over one warm memcpy",
        quotient=("stall_ms", "memcpy_ms"),
    ),
    Figure(key="first_stall_over_warm", title="stall of the first save, over those that follow"),
    Figure(
        key="load_over_raw_read",
        title="raw O_DIRECT read, over our load with every hash verified",
        better="higher",
        quotient=("raw_read_ms", "load_ms"),
    ),
    Figure(
        key="vs_torch_save",
        title="torch.save + fsync, over ours",
        better="higher",
        quotient=("torch_save_ms", "durable_ms"),
    ),
    Figure(
        key="vs_safetensors",
        title="safetensors + fsync, over ours",
        better="higher",
        quotient=("safetensors_ms", "durable_ms"),
    ),
    Figure(key="vs_dcp", title="torch DCP + fsync, over ours", better="higher", quotient=("dcp_ms", "durable_ms")),
    Figure(key="vs_orbax", title="orbax + fsync, over ours", better="higher", quotient=("orbax_ms", "durable_ms")),
    Figure(
        key="vs_dcp_async_stall",
        title="stall of DCP's asynchronous save in a process, over ours",
        better="higher",
        quotient=("dcp_async_stall_ms", "stall_ms"),
    ),
    Figure(
        key="vs_orbax_async_stall",
        title="stall of orbax's asynchronous save, over ours",
        better="higher",
        quotient=("orbax_async_stall_ms", "stall_ms"),
    ),
    Figure(key="s3_put_over_bare", title="S3: bare obstore put, over our save until durable", better="higher"),
    Figure(key="s3_get_over_bare", title="S3: bare obstore get, over our load and verify", better="higher"),
    Figure(key="incremental_bytes_fraction", title="1 % of a table's rows new: bytes, of a full save"),
    Figure(key="incremental_time_fraction", title="… time until durable, of a full save; rows found by comparing"),
    Figure(key="incremental_told_time_fraction", title="… time until durable, of a full save; rows told"),
    Figure(key="small_tensors_over_large", title="20,000 small tensors until durable, over the same bytes in 16"),
)

OURS = (
    Figure(key="durable_ms", title="save until durable", unit="ms"),
    Figure(key="stall_ms", title="… until training goes on", unit="ms"),
    Figure(key="first_stall_ms", title="… the first one, right after `prepare`", unit="ms"),
    Figure(key="load_ms", title="load and verify, into memory that was in use just before", unit="ms"),
    Figure(key="first_load_ms", title="… the first one", unit="ms"),
    Figure(key="peek_ms", title="open for a look at what there is", unit="ms"),
    Figure(key="one_of_1000_ms", title="load one tensor of 1,000", unit="ms"),
    Figure(key="incremental_full_ms", title="a table, full save until durable", unit="ms"),
    Figure(key="incremental_ms", title="… 1 % of the rows new, found by comparing", unit="ms"),
    Figure(key="incremental_told_ms", title="… 1 % of the rows new, told", unit="ms"),
    Figure(key="incremental_full_stall_ms", title="a table, stall of a full save", unit="ms"),
    Figure(key="incremental_stall_ms", title="… 1 % of the rows new, found by comparing", unit="ms"),
    Figure(key="incremental_told_stall_ms", title="… 1 % of the rows new, told", unit="ms"),
    Figure(key="s3_put_ms", title="S3: save until durable", unit="ms"),
    Figure(key="s3_get_ms", title="S3: load and verify", unit="ms"),
    Figure(key="s3_client_cpu_s", title="S3: CPU of save and load, with the saver process", unit="s"),
)

OTHERS = (
    Figure(key="s3_bare_put_ms", title="S3: bare obstore, one multipart put", unit="ms"),
    Figure(key="s3_bare_get_ms", title="S3: bare obstore, ranges side by side", unit="ms"),
    Figure(key="s3_bare_client_cpu_s", title="S3: CPU of bare obstore, put and get", unit="s"),
    Figure(key="raw_write_ms", title="raw O_DIRECT write, 4 threads, fsync", unit="ms"),
    Figure(key="raw_read_ms", title="raw O_DIRECT read, 4 threads", unit="ms"),
    Figure(key="memcpy_ms", title="memcpy into warm memory, 2 threads", unit="ms"),
    Figure(key="torch_save_ms", title="torch.save + fsync", unit="ms"),
    Figure(key="safetensors_ms", title="safetensors save_file + fsync", unit="ms"),
    Figure(key="dcp_ms", title="torch DCP save, 2 threads, fsync", unit="ms"),
    Figure(key="dcp_async_stall_ms", title="torch DCP, asynchronous in a process: stall", unit="ms"),
    Figure(key="orbax_ms", title="orbax save + fsync", unit="ms"),
    Figure(key="orbax_async_stall_ms", title="orbax, asynchronous: stall", unit="ms"),
)

BENCHMARK = Benchmark(
    name="checkpoint",
    title="Checkpoints",
    contenders=(
        contender("raw disk", "raw"),
        contender("strata", "strata"),
        contender("incremental", "incremental"),
        contender("s3", "s3"),
        peer("torch", "torch"),
        peer("safetensors", "safetensors"),
        peer("orbax", "orbax"),
    ),
    figures=(*RATIOS, *OURS, *OTHERS),
    settings=(
        Setting(name="gib", title="GiB of the state and of the table, 1 unless told", at_least=1 / 1024, whole=False),
        Setting(name="tensors", title="tensors in the state, 16 unless told", at_least=1),
        Setting(name="small_tensors", title="small tensors of the same bytes, 20000 unless told", at_least=1),
        Setting(name="columns", title="numbers in a row of the table, 64 unless told", at_least=1),
        Setting(name="dirty_percent", title="rows of the table that change, 1 unless told", at_least=0, whole=False),
        Setting(name="s3_mib", title="MiB that go to S3 and back, 256 unless told", at_least=16),
    ),
    notes=(
        "1 GiB of fp32 in 16 tensors, in the working directory; --set gib=0.25, tensors=64, … (or STRATA_BENCH_GIB).",
        "Each process saves once to warm up, then three times; its figure is the median.",
        "Ours as it is without any setting: saver process, every byte hashed, manifest, commit, statistics afterwards.",
        "… the others' files carry no hash; they are synced to the disk, as ours are.",
        "The raw ceiling writes and reads the same bytes from and into warm, aligned memory.",
        "Loads make their own memory; the first one of a process has to get it from the system.",
        "The table: fp32, rows of 64 numbers, other random rows each time; fractions of the full save just before.",
        "S3: SeaweedFS on loopback, 256 MiB (--set s3_mib=1024); bare obstore with the best of 5 settings, ours as is.",
        "… client CPU is until durable, and of the load; statistics, which follow, are not in it.",
    ),
)
