"""`strata bench checkpoint`: save and load times compared with the raw disk and with peers at equal durability."""

from __future__ import annotations

from strata.bench.frame import Benchmark, Contender, Figure, Setting

TIMEOUT_S = 1_200.0
"""Enough to write 1 GiB a dozen times and read it several times on a disk that drops to 50 MB/s."""


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
        title="durable save / raw O_DIRECT write",
        quotient=("durable_ms", "raw_write_ms"),
    ),
    Figure(
        key="stall_over_memcpy",
        title="training stall / one warm memcpy",
        quotient=("stall_ms", "memcpy_ms"),
    ),
    Figure(key="first_stall_over_warm", title="training stall of the first save / of later saves"),
    Figure(
        key="load_over_raw_read",
        title="raw O_DIRECT read / load with every hash verified",
        better="higher",
        quotient=("raw_read_ms", "load_ms"),
    ),
    Figure(
        key="vs_torch_save",
        title="torch.save + fsync / Strata",
        better="higher",
        quotient=("torch_save_ms", "durable_ms"),
    ),
    Figure(
        key="vs_safetensors",
        title="safetensors + fsync / Strata",
        better="higher",
        quotient=("safetensors_ms", "durable_ms"),
    ),
    Figure(key="vs_dcp", title="torch DCP + fsync / Strata", better="higher", quotient=("dcp_ms", "durable_ms")),
    Figure(key="vs_orbax", title="orbax + fsync / Strata", better="higher", quotient=("orbax_ms", "durable_ms")),
    Figure(
        key="vs_dcp_async_stall",
        title="training stall: DCP async save in a process / Strata",
        better="higher",
        quotient=("dcp_async_stall_ms", "stall_ms"),
    ),
    Figure(
        key="vs_orbax_async_stall",
        title="training stall: orbax async save / Strata",
        better="higher",
        quotient=("orbax_async_stall_ms", "stall_ms"),
    ),
    Figure(key="s3_put_over_bare", title="S3: plain obstore put / durable save", better="higher"),
    Figure(key="s3_get_over_bare", title="S3: plain obstore get / load and verify", better="higher"),
    Figure(key="incremental_bytes_fraction", title="save with 1 % of rows changed: bytes / full save"),
    Figure(key="incremental_time_fraction", title="… time until durable / full save, rows found by comparison"),
    Figure(key="incremental_told_time_fraction", title="… time until durable / full save, rows passed with dirty="),
    Figure(key="small_tensors_over_large", title="durable save of 20,000 small tensors / of 16 with the same bytes"),
)

OURS = (
    Figure(key="durable_ms", title="save until durable", unit="ms"),
    Figure(key="stall_ms", title="… training stall", unit="ms"),
    Figure(key="first_stall_ms", title="… training stall of the first save, right after `prepare`", unit="ms"),
    Figure(key="load_ms", title="load and verify, into recently used memory", unit="ms"),
    Figure(key="first_load_ms", title="… first load of the process", unit="ms"),
    Figure(key="peek_ms", title="list checkpoints", unit="ms"),
    Figure(key="one_of_1000_ms", title="load one tensor of 1,000", unit="ms"),
    Figure(key="incremental_full_ms", title="table: full save until durable", unit="ms"),
    Figure(key="incremental_ms", title="… 1 % of rows changed, found by comparison", unit="ms"),
    Figure(key="incremental_told_ms", title="… 1 % of rows changed, passed with dirty=", unit="ms"),
    Figure(key="incremental_full_stall_ms", title="table: training stall of a full save", unit="ms"),
    Figure(key="incremental_stall_ms", title="… 1 % of rows changed, found by comparison", unit="ms"),
    Figure(key="incremental_told_stall_ms", title="… 1 % of rows changed, passed with dirty=", unit="ms"),
    Figure(key="s3_put_ms", title="S3: save until durable", unit="ms"),
    Figure(key="s3_get_ms", title="S3: load and verify", unit="ms"),
    Figure(key="s3_client_cpu_s", title="S3: CPU of save and load, including the saver process", unit="s"),
)

OTHERS = (
    Figure(key="s3_bare_put_ms", title="S3: plain obstore, one multipart put", unit="ms"),
    Figure(key="s3_bare_get_ms", title="S3: plain obstore, parallel range requests", unit="ms"),
    Figure(key="s3_bare_client_cpu_s", title="S3: CPU of plain obstore, put and get", unit="s"),
    Figure(key="raw_write_ms", title="raw O_DIRECT write, 4 threads, fsync", unit="ms"),
    Figure(key="raw_read_ms", title="raw O_DIRECT read, 4 threads", unit="ms"),
    Figure(key="memcpy_ms", title="memcpy into warm memory, 2 threads", unit="ms"),
    Figure(key="torch_save_ms", title="torch.save + fsync", unit="ms"),
    Figure(key="safetensors_ms", title="safetensors save_file + fsync", unit="ms"),
    Figure(key="dcp_ms", title="torch DCP save, 2 threads, fsync", unit="ms"),
    Figure(key="dcp_async_stall_ms", title="torch DCP, async in a process: training stall", unit="ms"),
    Figure(key="orbax_ms", title="orbax save + fsync", unit="ms"),
    Figure(key="orbax_async_stall_ms", title="orbax, async: training stall", unit="ms"),
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
        Setting(name="gib", title="GiB of the state and of the table (default 1)", at_least=1 / 1024, whole=False),
        Setting(name="tensors", title="tensors in the state (default 16)", at_least=1),
        Setting(name="small_tensors", title="small tensors with the same bytes (default 20000)", at_least=1),
        Setting(name="columns", title="columns of the table (default 64)", at_least=1),
        Setting(name="dirty_percent", title="percent of the rows that change (default 1)", at_least=0, whole=False),
        Setting(name="s3_mib", title="size of the state for S3 in MiB (default 256)", at_least=16),
    ),
    notes=(
        "State: 1 GiB of fp32 in 16 tensors, in the working directory; change it with --set gib=0.25, tensors=64, …",
        "Each process saves once to warm up and then three times; the figure is the median.",
        "Strata uses defaults: saver process, every byte hashed, manifest, commit, statistics after the commit.",
        "Peers write files without hashes and flush them to disk, as Strata does.",
        "Raw disk: writes and reads the same bytes from and to warm, aligned memory.",
        "Loads allocate their memory; the first load of a process gets it from the operating system.",
        "Table: fp32, rows of 64 values, other random rows change each time; divided by the preceding full save.",
        "S3: SeaweedFS on loopback, 256 MiB (--set s3_mib=1024); plain obstore uses the best of 5 settings.",
        "S3 client CPU covers the save until durable and the load, but not the statistics that follow.",
    ),
)
