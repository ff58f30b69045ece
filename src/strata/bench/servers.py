"""`strata bench servers`: training with a large table on parameter servers, against DDP and torchrec."""

from __future__ import annotations

from typing import Literal

from strata.bench.frame import Benchmark, Contender, Figure, Setting

UNITS = (400, 64)
ALLOCATORS = {"": "", "_plain": ", plain malloc"}
"""By the suffix of a figure."""
SYSTEMS = {
    "strata": "Strata, row-wise Adagrad",
    "strata_adagrad": "Strata, Adagrad",
    "ddp_sparse": "DDP, sparse gradients",
    "torchrec": "torchrec, table-wise",
    "ddp_dense": "DDP, dense gradients",
}


def contender(
    name: str, module: str, *, venv: Literal["ours", "peers"] = "ours", usual_s: float, timeout_s: float
) -> Contender:
    return Contender(
        name=name,
        module=f"strata.bench.contenders.servers_{module}",
        venv=venv,
        usual_s=usual_s,
        timeout_s=timeout_s,
    )


def ratios(key: str, title: str, peer: str, ours: str, units: int) -> list[Figure]:
    """Return the comparisons with a peer: CPU time per sample and samples/s, under both settings of malloc."""
    found = []
    for suffix, setting in ALLOCATORS.items():
        cpu = (f"{peer}_{units}{suffix}_cpu_us", f"{ours}_{units}{suffix}_cpu_us")
        wall = (f"{ours}_{units}{suffix}_samples_per_s", f"{peer}_{units}{suffix}_samples_per_s")
        found += [
            Figure(key=f"{key}{suffix}", title=f"{title}, CPU{setting}", better="higher", quotient=cpu),
            Figure(key=f"{key}{suffix}_wall", title=f"… samples/s{setting}", better="higher", quotient=wall),
        ]
    return found


def measured(system: str, units: int) -> list[Figure]:
    found = []
    for suffix, setting in ALLOCATORS.items():
        title = f"{SYSTEMS[system]}, 3 × {units}{setting}"
        found += [
            Figure(key=f"{system}_{units}{suffix}_cpu_us", title=title, unit="µs CPU/sample"),
            Figure(key=f"{system}_{units}{suffix}_samples_per_s", title="…", unit="samples/s", better="higher"),
        ]
    return found


BENCHMARK = Benchmark(
    name="servers",
    title="Parameter servers",
    contenders=(
        contender("strata", "strata", usual_s=90.0, timeout_s=600.0),
        contender("strata, Adagrad", "strata_adagrad", usual_s=100.0, timeout_s=600.0),
        contender("torchrec", "torchrec", venv="peers", usual_s=90.0, timeout_s=600.0),
        contender("DDP, sparse gradients", "ddp_sparse", usual_s=120.0, timeout_s=900.0),
        contender("DDP, dense gradients", "ddp_dense", usual_s=60.0, timeout_s=900.0),
        contender("kernels", "kernels", usual_s=30.0, timeout_s=300.0),
        contender("memory", "memory", usual_s=30.0, timeout_s=300.0),
        contender("delay", "delay", usual_s=60.0, timeout_s=600.0),
    ),
    figures=(
        *(
            figure
            for units in UNITS
            for figure in (
                *ratios(
                    f"vs_ddp_sparse_{units}",
                    f"3 × {units} units: DDP with sparse gradients / Strata, both Adagrad",
                    "ddp_sparse",
                    "strata_adagrad",
                    units,
                ),
                *ratios(
                    f"vs_torchrec_{units}",
                    f"3 × {units} units: torchrec / Strata, both row-wise Adagrad",
                    "torchrec",
                    "strata",
                    units,
                ),
            )
        ),
        *ratios("vs_ddp_dense", "3 × 400 units: DDP with dense gradients / Strata", "ddp_dense", "strata_adagrad", 400),
        Figure(key="ddp_dense_rows", title="… rows of the table with dense gradients", better="higher"),
        Figure(key="gather_over_c", title="pull of a batch, find and gather: C / table", better="higher"),
        Figure(key="adagrad_over_c", title="row-wise Adagrad of a batch: C / table", better="higher"),
        Figure(key="push_over_c", title="push of a batch, all of it: C / table", better="higher"),
        Figure(
            key="delay_kept_fraction",
            title="samples/s with 20 ms of delay in each direction / without",
            better="higher",
        ),
        Figure(key="delay_kept_without_prefetch_fraction", title="… without prefetch", better="higher"),
        Figure(key="incremental_bytes_fraction", title="rows changed by 10 batches / all rows, in bytes of a save"),
        Figure(key="memory_over_rows_and_state", title="resident memory of a full table / rows and state"),
        Figure(key="counted_over_rows_and_state", title="… as the table counts it"),
        *(figure for units in UNITS for system in list(SYSTEMS)[:-1] for figure in measured(system, units)),
        *measured("ddp_dense", 400),
        *(
            Figure(key=f"table_{prefix}{name}_ms", title=f"{language}: {name}", unit="ms CPU")
            for name in ("pull", "push", "update")
            for prefix, language in (("", "table"), ("c_", "C"))
        ),
        Figure(key="delay_none_samples_per_s", title="Strata over TCP, 3 × 64", unit="samples/s", better="higher"),
        Figure(key="delay_samples_per_s", title="… with delay", unit="samples/s", better="higher"),
    ),
    rounds=3,
    quick_rounds=1,
    settings=(
        Setting(name="rows", title="rows of the table (default 10000000)", at_least=1_000),
        Setting(name="samples", title="samples in a batch of a worker (default 4096)", at_least=1),
        Setting(name="steps", title="timed steps (default 12)", at_least=1),
    ),
    notes=(
        "2 workers on this machine with gloo, one thread each; a table of 10 M × 64 float32 numbers, batches of",
        "… 4,096 × 26 ids with a Zipf distribution (1.05), an MLP on their embeddings, binary cross-entropy, Adagrad.",
        "CPU: user and system time of all processes, those of servers included. Batches exist before the timed steps.",
        "malloc keeps large buffers on both sides (MALLOC_MMAP_THRESHOLD_, MALLOC_TRIM_THRESHOLD_), as in workers of",
        "… the Trainer; plain malloc: glibc's defaults, for both sides.",
        "Strata: one server, shared memory, staleness 4, the rows of the next batch are prefetched, as in the Trainer,",
        "… whose loop is not used. torchrec and DDP are synchronous. torchrec has its one table on one rank.",
        "Dense gradients: with fewer rows if 10 M do not fit into memory twice; the cost grows with the rows. Ours has",
        "… 10 M in this comparison, too.",
        "Kernels: C is compiled with gcc -O3 -march=native -ffast-math; CPU time of one thread, in turns.",
        "Delay: TCP through a process that holds bytes back, 3 × 64 units; also without delay.",
        "Saves are written to a temporary directory: a full one, and an incremental one after 10 batches.",
    ),
)
