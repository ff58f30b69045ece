"""`strata bench data`: how near to the decoder our loader comes, beside others; and how soon it starts and resumes."""

from __future__ import annotations

from typing import Literal

from strata.bench.frame import Benchmark, Contender, Figure, Setting

TIMEOUT_S = 900.0
"""For a contender that makes its files before it measures, on a slow disk."""


def contender(name: str, module: str, *, venv: Literal["ours", "peers"] = "ours") -> Contender:
    return Contender(
        name=name, module=f"strata.bench.contenders.data_{module}", venv=venv, timeout_s=TIMEOUT_S, usual_s=40.0
    )


def over(key: str, title: str, *theirs: str, ours: str = "rows_per_s") -> Figure:
    return Figure(key=key, title=title, better="higher", quotient=(ours, *theirs))


def speed(key: str, title: str) -> Figure:
    return Figure(key=key, title=title, unit="rows/s", better="higher")


PEERS = ("tdu_rows_per_s", "hf_rows_per_s", "litdata_rows_per_s", "torch_rows_per_s")
"""Each at its best."""

RATIOS = (
    over("over_decode_ceiling", "ours, over the decoder's ceiling", "ceiling_rows_per_s"),
    over("over_decode_ceiling_shuffled", "… shuffled", "ceiling_rows_per_s", ours="shuffled_rows_per_s"),
    over(
        "large_buffer_over_default",
        "shuffled with a buffer of 1 M rows, over the default of 100,000",
        "shuffled_rows_per_s",
        ours="large_buffer_rows_per_s",
    ),
    over(
        "large_buffer_over_ceiling",
        "… over the same shuffle with numpy, which holds the buffer twice",
        "large_buffer_ceiling_rows_per_s",
        ours="large_buffer_rows_per_s",
    ),
    over("over_bare_decode", "ours, over decoding whole row groups and no batches", "bare_decode_rows_per_s"),
    over(
        "projection_over_ceiling",
        "2 of 66 columns: ours, over the ceiling of these two",
        "projection_ceiling_rows_per_s",
        ours="projection_rows_per_s",
    ),
    over(
        "vs_torch_dataloader_utils",
        "ours, over torch-dataloader-utils at its best",
        "tdu_rows_per_s",
    ),
    over("vs_hf_datasets", "ours, over HF datasets at its best", "hf_rows_per_s"),
    over("vs_litdata", "ours, over LitData at its best", "litdata_rows_per_s"),
    over("vs_torch_dataloader", "ours, over torch DataLoader and pyarrow at its best", "torch_rows_per_s"),
    over("vs_torch_dataloader_2_workers", "… with 2 workers", "torch_2_workers_rows_per_s"),
    over("vs_torch_dataloader_inline", "… without workers", "torch_inline_rows_per_s"),
    over("vs_best_peer", "ours, over the fastest of all of these", *PEERS),
    Figure(key="growth_rows_per_s_ratio", title="rows/s of 50 times the rows, over rows/s of few", better="higher"),
    Figure(key="growth_peak_pss_ratio", title="… and the most memory, over that of few"),
    Figure(key="pss_over_allowed", title="memory of the loader, over window + 2 × split_bytes × workers"),
)

OURS = (
    speed("rows_per_s", "ours, in the order of the files"),
    speed("shuffled_rows_per_s", "ours, shuffled"),
    speed("large_buffer_rows_per_s", "… with a buffer of 1 M rows"),
    speed("small_batches_rows_per_s", "ours, in batches of 1,024"),
    speed("projection_rows_per_s", "ours, 2 of 66 columns"),
    Figure(key="first_batch_s", title="constructor to first batch, 1,000 files", unit="s"),
    Figure(key="first_batch_8_files_s", title="… 8 files", unit="s"),
    Figure(key="first_batch_8_files_shuffled_s", title="… 8 files, shuffled", unit="s"),
    Figure(key="plan_10k_files_s", title="planning 10,000 files, nothing remembered", unit="s"),
    Figure(key="plan_10k_files_cached_s", title="… for the second time", unit="s"),
    Figure(key="resume_s", title="constructor to first batch after 10, 50, 90 % of an epoch: the longest", unit="s"),
    Figure(key="peak_pss_mb", title="the most memory of the process in a pass, plain or shuffled", unit="MB"),
    Figure(key="base_pss_mb", title="… with a loader, before its first batch", unit="MB"),
    speed("growth_small_rows_per_s", "growth: few rows"),
    speed("growth_large_rows_per_s", "growth: 50 times as many"),
    Figure(key="growth_small_peak_pss_mb", title="growth: the most memory with few rows", unit="MB"),
    Figure(key="growth_large_peak_pss_mb", title="growth: … with 50 times as many", unit="MB"),
)

OTHERS = (
    speed("ceiling_rows_per_s", "the decoder's ceiling: pyarrow in 2 threads, batches touched"),
    speed("large_buffer_ceiling_rows_per_s", "… shuffled by numpy in buffers of 1 M rows"),
    speed("bare_decode_rows_per_s", "… whole row groups touched"),
    speed("projection_ceiling_rows_per_s", "… 2 of 66 columns"),
    speed("tdu_rows_per_s", "torch-dataloader-utils at its best"),
    speed("tdu_inline_rows_per_s", "… num_workers=0"),
    speed("tdu_2_workers_rows_per_s", "… num_workers=2"),
    speed("hf_rows_per_s", "HF datasets at its best"),
    speed("hf_streaming_rows_per_s", "… streaming Parquet, 2 workers"),
    speed("hf_mapped_rows_per_s", "… its own Arrow copy, 2 workers"),
    speed("litdata_rows_per_s", "LitData at its best"),
    speed("litdata_inline_rows_per_s", "… num_workers=0"),
    speed("litdata_2_workers_rows_per_s", "… num_workers=2"),
    speed("torch_rows_per_s", "torch DataLoader over pyarrow at its best"),
    speed("torch_inline_rows_per_s", "… num_workers=0, pyarrow's own threads"),
    speed("torch_2_workers_rows_per_s", "… num_workers=2"),
    Figure(key="dataset_mb", title="the 41-column dataset on the disk", unit="MB"),
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
        Setting(name="rows", title="rows of the 41-column dataset, 4000000 unless told", at_least=1_000),
        Setting(name="batch_size", title="rows of a batch, 4096 unless told", at_least=1),
        Setting(name="files", title="small files to plan, 10000 unless told; a tenth of it to read", at_least=10),
    ),
    notes=(
        "4 M rows × 41 columns, snappy: id, 13 float32, 26 int32 or int64, int8 label; 8 files of 4 row groups.",
        "… made once, in .build/bench-data of the checkout or STRATA_BENCH_DATA_DIR; read from the page cache by all:",
        "… whoever times one pass alone has read its files once before, HF and LitData their own copies.",
        "Batches of 4,096, as models of tables take them; what is done per batch counts at 1,024, which is shown too.",
        "Everybody's consumer reads an element of each column and sums all ids, which must come out exactly.",
        "Ceiling and ours: 2 decode threads; the median of 3 passes, with their start, after one that does not count.",
        "Peers with workers read fewer rows, LitData 1 of the 8 files, others 2; and count from their first batch.",
        "LitData reads its own format, which `optimize` wrote before; a row is a sample of 4 arrays.",
        "Growth: 1 M rows are 2 of the 8 files; 50 M are 100 links to the 8. Of 66 columns: 16 M rows, 4 files linked.",
        "First batch, planning: the call of create_dataloader counts, imports do not; nothing is remembered.",
        "Resume: the longest of three places, plain and shuffled, planning included and nothing remembered;",
        "… the batch is compared with the one that was due.",
    ),
)
