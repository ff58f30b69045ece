"""`strata bench data`: loader throughput compared with the decoder's limit and peers; time to start and to resume."""

from __future__ import annotations

from typing import Literal

from strata.bench.frame import Benchmark, Contender, Figure, Setting

TIMEOUT_S = 900.0
"""Enough for a contender that first writes its files to a slow disk."""


def contender(name: str, module: str, *, venv: Literal["ours", "peers"] = "ours") -> Contender:
    return Contender(
        name=name, module=f"strata.bench.contenders.data_{module}", venv=venv, timeout_s=TIMEOUT_S, usual_s=40.0
    )


def over(key: str, title: str, *theirs: str, ours: str = "rows_per_s") -> Figure:
    return Figure(key=key, title=title, better="higher", quotient=(ours, *theirs))


def speed(key: str, title: str) -> Figure:
    return Figure(key=key, title=title, unit="rows/s", better="higher")


PEERS = ("tdu_rows_per_s", "hf_rows_per_s", "litdata_rows_per_s", "torch_rows_per_s")
"""Each peer in its best configuration."""

RATIOS = (
    over("over_decode_ceiling", "Strata / decoder limit", "ceiling_rows_per_s"),
    over("over_decode_ceiling_shuffled", "… shuffled", "ceiling_rows_per_s", ours="shuffled_rows_per_s"),
    over(
        "large_buffer_over_default",
        "Strata, shuffle buffer of 1 M rows / of 100,000 (default)",
        "shuffled_rows_per_s",
        ours="large_buffer_rows_per_s",
    ),
    over(
        "large_buffer_over_ceiling",
        "… / the same shuffle with numpy, which holds the buffer twice",
        "large_buffer_ceiling_rows_per_s",
        ours="large_buffer_rows_per_s",
    ),
    over("over_bare_decode", "Strata / decoding row groups without batches", "bare_decode_rows_per_s"),
    over(
        "projection_over_ceiling",
        "2 of 66 columns: Strata / decoder limit",
        "projection_ceiling_rows_per_s",
        ours="projection_rows_per_s",
    ),
    over(
        "vs_torch_dataloader_utils",
        "Strata / torch-dataloader-utils, best configuration",
        "tdu_rows_per_s",
    ),
    over("vs_hf_datasets", "Strata / HF datasets, best configuration", "hf_rows_per_s"),
    over("vs_litdata", "Strata / LitData, best configuration", "litdata_rows_per_s"),
    over("vs_torch_dataloader", "Strata / torch DataLoader with pyarrow, best configuration", "torch_rows_per_s"),
    over("vs_torch_dataloader_2_workers", "… with 2 workers", "torch_2_workers_rows_per_s"),
    over("vs_torch_dataloader_inline", "… without workers", "torch_inline_rows_per_s"),
    over("vs_best_peer", "Strata / fastest peer", *PEERS),
    Figure(key="growth_rows_per_s_ratio", title="throughput with 50 × the rows / with few rows", better="higher"),
    Figure(key="growth_peak_pss_ratio", title="… peak memory with 50 × the rows / with few rows"),
    Figure(key="pss_over_allowed", title="loader memory / (shuffle buffer + 2 × split_bytes × decode threads)"),
)

OURS = (
    speed("rows_per_s", "Strata, in file order"),
    speed("shuffled_rows_per_s", "Strata, shuffled"),
    speed("large_buffer_rows_per_s", "… with a shuffle buffer of 1 M rows"),
    speed("small_batches_rows_per_s", "Strata, batches of 1,024 rows"),
    speed("projection_rows_per_s", "Strata, 2 of 66 columns"),
    Figure(key="first_batch_s", title="time to first batch, 1,000 files", unit="s"),
    Figure(key="first_batch_8_files_s", title="… 8 files", unit="s"),
    Figure(key="first_batch_8_files_shuffled_s", title="… 8 files, shuffled", unit="s"),
    Figure(key="plan_10k_files_s", title="planning 10,000 files, cold cache", unit="s"),
    Figure(key="plan_10k_files_cached_s", title="… warm cache", unit="s"),
    Figure(key="resume_s", title="time to first batch after a resume at 10, 50 or 90 % of an epoch, longest", unit="s"),
    Figure(key="peak_pss_mb", title="peak memory of the process in an epoch, shuffled or not", unit="MB"),
    Figure(key="base_pss_mb", title="… with a loader, before the first batch", unit="MB"),
    speed("growth_small_rows_per_s", "growth: few rows"),
    speed("growth_large_rows_per_s", "growth: 50 × the rows"),
    Figure(key="growth_small_peak_pss_mb", title="growth: peak memory with few rows", unit="MB"),
    Figure(key="growth_large_peak_pss_mb", title="growth: peak memory with 50 × the rows", unit="MB"),
)

OTHERS = (
    speed("ceiling_rows_per_s", "decoder limit: pyarrow in 2 threads, every batch touched"),
    speed("large_buffer_ceiling_rows_per_s", "… shuffled by numpy in buffers of 1 M rows"),
    speed("bare_decode_rows_per_s", "… whole row groups touched"),
    speed("projection_ceiling_rows_per_s", "… 2 of 66 columns"),
    speed("tdu_rows_per_s", "torch-dataloader-utils, best configuration"),
    speed("tdu_inline_rows_per_s", "… num_workers=0"),
    speed("tdu_2_workers_rows_per_s", "… num_workers=2"),
    speed("hf_rows_per_s", "HF datasets, best configuration"),
    speed("hf_streaming_rows_per_s", "… streaming Parquet, 2 workers"),
    speed("hf_mapped_rows_per_s", "… converted to Arrow, 2 workers"),
    speed("litdata_rows_per_s", "LitData, best configuration"),
    speed("litdata_inline_rows_per_s", "… num_workers=0"),
    speed("litdata_2_workers_rows_per_s", "… num_workers=2"),
    speed("torch_rows_per_s", "torch DataLoader with pyarrow, best configuration"),
    speed("torch_inline_rows_per_s", "… num_workers=0, pyarrow's threads"),
    speed("torch_2_workers_rows_per_s", "… num_workers=2"),
    Figure(key="dataset_mb", title="size of the 41-column dataset on disk", unit="MB"),
)

BENCHMARK = Benchmark(
    name="data",
    title="Structured data",
    contenders=(
        contender("dataset", "dataset"),
        contender("ceiling", "ceiling"),
        contender("strata", "strata"),
        contender("strata start", "strata_start"),
        contender("strata growth", "strata_growth"),
        contender("torch-dataloader-utils", "torch_dataloader_utils", venv="peers"),
        contender("hf datasets", "hf_datasets", venv="peers"),
        contender("litdata", "litdata", venv="peers"),
        contender("torch dataloader", "torch_dataloader", venv="peers"),
    ),
    figures=(*RATIOS, *OURS, *OTHERS),
    rounds=3,
    quick_rounds=1,
    settings=(
        Setting(name="rows", title="rows of the 41-column dataset (default 4000000)", at_least=1_000),
        Setting(name="batch_size", title="rows per batch (default 4096)", at_least=1),
        Setting(name="files", title="small files to plan (default 10000); a tenth of them is read", at_least=10),
    ),
    notes=(
        "4 M rows × 41 columns, snappy: id, 13 float32, 26 int32 or int64, int8 label; 8 files of 4 row groups.",
        "… generated once in .build/bench-data of the checkout or in STRATA_BENCH_DATA_DIR.",
        "… all contenders read from the page cache; those that time one pass read their files once before.",
        "Batches of 4,096 rows are usual for tabular models; batches of 1,024 show the cost per batch.",
        "Each consumer reads one element of every column and sums all ids; the sum must be exact.",
        "Decoder limit and Strata: 2 decode threads; median of 3 passes including startup, after one warm-up pass.",
        "Peers with workers read fewer rows (LitData 1 of the 8 files, others 2) and are timed from their first batch.",
        "LitData reads its own format, written before by `optimize`; a row is a sample of 4 arrays.",
        "Growth: 1 M rows are 2 of the 8 files; 50 M rows are 100 links to them. 66 columns: 16 M rows, 4 files.",
        "First batch and planning include create_dataloader, but not imports; the cache is cold.",
        "Resume: longest of three positions, shuffled and not, including planning with a cold cache;",
        "… the first batch is compared with the expected one.",
    ),
)
