"""`strata bench webdata`: tar shards compared with SPDL, webdataset and others; resume, indexes, and shared memory."""

from __future__ import annotations

from typing import Literal

from strata.bench.frame import Benchmark, Contender, Figure, Setting

TIMEOUT_S = 900.0
"""Enough for a contender that first writes its files to a slow disk."""

SIZES = {"10kb": "10 kB", "100kb": "100 kB"}
"""As figures name them → as titles do."""


def contender(
    name: str,
    module: str,
    *,
    venv: Literal["ours", "peers"] = "ours",
    usual_s: float = 20.0,
) -> Contender:
    return Contender(
        name=name,
        module=f"strata.bench.contenders.webdata_{module}",
        venv=venv,
        timeout_s=TIMEOUT_S,
        usual_s=usual_s,
    )


def over(key: str, title: str, ours: str, *theirs: str) -> Figure:
    return Figure(key=key, title=title, better="higher", quotient=(ours, *theirs))


def speed(key: str, title: str) -> Figure:
    return Figure(key=f"{key}_mb_per_s", title=title, unit="MB/s", better="higher")


def images(key: str, title: str) -> Figure:
    return Figure(key=f"{key}images_per_s", title=title, unit="images/s", better="higher")


def ratios(size: str, shown: str) -> tuple[Figure, ...]:
    """Return our figures of one size relative to those of others."""
    shuffled, plain = f"shuffled_{size}_mb_per_s", f"plain_{size}_mb_per_s"
    return (
        over(
            f"tar_{size}_over_spdl", f"{shown}: Strata, shuffled, with states / SPDL", shuffled, f"spdl_{size}_mb_per_s"
        ),
        over(f"tar_{size}_plain_over_spdl", "… in file order", plain, f"spdl_{size}_mb_per_s"),
        over(
            f"tar_{size}_over_webdataset",
            f"{shown}: Strata, shuffled, with states / webdataset, best number of workers",
            shuffled,
            f"webdataset_{size}_mb_per_s",
        ),
        over(f"tar_{size}_over_raw", f"{shown}: Strata, in file order / raw read", plain, f"raw_{size}_mb_per_s"),
        over(f"tar_{size}_shuffled_over_raw", "… shuffled, with states", shuffled, f"raw_{size}_mb_per_s"),
        *(
            over(
                f"tar_{size}_over_{key}",
                f"{shown}: Strata, shuffled, with states / {name}",
                shuffled,
                f"{key}_{size}_mb_per_s",
            )
            for key, name in (("tarfile", "tarfile"), ("litdata", "LitData"), ("hf", "HF datasets"))
        ),
    )


def speeds(size: str, shown: str) -> tuple[Figure, ...]:
    return (
        speed(f"plain_{size}", f"{shown}: Strata, in file order"),
        speed(f"shuffled_{size}", "… shuffled, with states"),
        speed(f"raw_{size}", "… raw read"),
        speed(f"walk_{size}", "… header walk over mapped files, nothing read"),
        speed(f"spdl_{size}", "… SPDL, best way"),
        speed(f"spdl_{size}_read", "… SPDL, shards read into memory"),
        speed(f"spdl_{size}_mapped", "… SPDL, shards mapped, members copied"),
        speed(f"spdl_{size}_pipeline", "… SPDL, pipeline of 2 threads"),
        speed(f"webdataset_{size}", "… webdataset, best number of workers"),
        *(speed(f"webdataset_{size}_{num}_workers", f"… webdataset, num_workers={num}") for num in (0, 2, 4)),
        speed(f"tarfile_{size}", "… tarfile"),
        speed(f"litdata_{size}", "… LitData, best number of workers"),
        speed(f"hf_{size}", "… HF datasets, best number of workers"),
    )


BENCHMARK = Benchmark(
    name="webdata",
    title="Tar shards",
    contenders=(
        contender("dataset", "dataset", usual_s=10.0),
        contender("limits", "limits", usual_s=25.0),
        contender("strata", "strata", usual_s=25.0),
        contender("strata start", "start", usual_s=60.0),
        contender("strata shared", "shared", usual_s=25.0),
        contender("spdl", "spdl", venv="peers"),
        contender("webdataset", "webdataset", venv="peers", usual_s=30.0),
        contender("litdata", "litdata", venv="peers"),
        contender("hf datasets", "hf_datasets", venv="peers"),
    ),
    figures=(
        *(figure for size, shown in SIZES.items() for figure in ratios(size, shown)),
        over("decode_over_decoder", "JPEG: Strata / decoder alone", "decoded_images_per_s", "decoder_images_per_s"),
        over("decode_over_spdl", "JPEG: Strata / SPDL with Pillow", "decoded_images_per_s", "spdl_images_per_s"),
        over("decode_over_webdataset", "JPEG: Strata / webdataset", "decoded_images_per_s", "webdataset_images_per_s"),
        Figure(key="resume_s", title="resume at 90 % of a shuffled epoch to the first batch", unit="s"),
        Figure(key="resume_without_index_s", title="… shards without indexes", unit="s"),
        Figure(key="random_access_s", title="jump of an open loader to a random sample", unit="s"),
        Figure(key="index_over_read", title="index of 1,000 shards of 100 kB samples / an epoch of them"),
        Figure(key="index_over_raw", title="… / raw read of them from the page cache"),
        Figure(key="index_s", title="… time", unit="s"),
        Figure(key="shared_bytes_ratio", title="2 ranks with shared_bytes: bytes read / bytes of one rank"),
        Figure(key="shared_speedup", title="… time without shared_bytes / with it", better="higher"),
        Figure(key="private_ranks_s", title="… time without shared_bytes", unit="s"),
        Figure(key="shared_ranks_s", title="… time with shared_bytes", unit="s"),
        *(figure for size, shown in SIZES.items() for figure in speeds(size, shown)),
        images("decoded_", "JPEG: Strata, shuffled"),
        images("decoder_", "… decoder alone in 2 threads"),
        images("spdl_", "… SPDL with Pillow in 2 threads"),
        images("webdataset_", "… webdataset, best number of workers"),
        Figure(key="shards_mb", title="size of all shards on disk", unit="MB"),
    ),
    rounds=3,
    quick_rounds=1,
    settings=(
        Setting(name="mb", title="megabytes of the shards of each size (default 512)", at_least=16),
        Setting(name="images", title="JPEGs (default 2048)", at_least=256),
        Setting(name="shards", title="shards to index (default 1000)", at_least=16),
        Setting(name="batch_size", title="samples per batch (default 128)", at_least=1),
    ),
    notes=(
        "16 shards of random bytes for each size, 512 MB; a sample is its payload and a label. Batches of 128 samples.",
        "… generated once in .build/bench-data of the checkout or in STRATA_BENCH_DATA_DIR; all read the page cache.",
        "MB/s count payloads. Every consumer reads the last byte of each payload and sums all labels, which must be",
        "… exact. Strata delivers lists of bytes; SPDL views of a shard in memory, or bytes; all others bytes.",
        "Strata: 2 decode threads. Shuffled: a buffer of 1,000 samples, and a state_dict every 10 batches.",
        "… peers read in file order and save nothing. Median of 3 passes after one warm-up pass.",
        "webdataset, LitData, HF datasets: one pass from its first batch, of 4 of the 16 shards at 10 kB. Best of 0, 2",
        "… (and for webdataset 4) workers. LitData reads its own format, written before.",
        "JPEG: 256 × 256 pixels, decoded by Pillow everywhere; the decoder alone has the files in memory.",
        "Resume and jump: the longer of both sizes. Resume plans again: cold cache, shards with indexes.",
        "Index: links to the shards with samples of 100 kB; an epoch is one pass of Strata in file order.",
        "2 ranks: processes that each deliver every sample of 16 gzipped shards of text, with one decode thread each.",
    ),
)
