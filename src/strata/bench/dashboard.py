"""`strata bench dashboard`: what the page costs the coordinator, its first paint against peers, and the explorer."""

from __future__ import annotations

from strata.bench.frame import Benchmark, Contender, Figure

PEERS = {
    "tensorboard": "TensorBoard",
    "optuna": "optuna-dashboard",
    "trackio": "trackio",
    "mlflow": "MLflow",
    "ray": "Ray's dashboard",
}
"""Prefix of a peer's figures → its name."""

PAGE = (
    ("first_useful_paint_ms", "navigation until the first name of a run or metric is visible", "ms"),
    ("first_contentful_paint_ms", "navigation until Chromium's first contentful paint", "ms"),
    ("entry_js_gz_kb", "JavaScript loaded by then, gzipped", "kB"),
    ("script_ms", "time in scripts until 2 s after it", "ms"),
    ("interaction_ms", "slowest of five keys in the search field until the next frame", "ms"),
)
"""Key, title and unit of the figures of a page, the same for all."""


def contender(name: str, module: str, *, usual_s: float, timeout_s: float = 300.0) -> Contender:
    return Contender(
        name=name, module=f"strata.bench.contenders.dashboard_{module}", usual_s=usual_s, timeout_s=timeout_s
    )


def peer(prefix: str, *, usual_s: float) -> Contender:
    """Return a peer. One that does not show its page before its deadline is lost."""
    return Contender(
        name=PEERS[prefix],
        module=f"strata.bench.contenders.dashboard_{prefix}",
        venv="peers-dashboard",
        usual_s=usual_s,
        timeout_s=300.0,
    )


def page_figures() -> tuple[Figure, ...]:
    """Return our figures, each followed by those of the peers."""
    figures: list[Figure] = []
    for key, title, unit in PAGE:
        theirs = {f"{prefix}_{key}": name for prefix, name in PEERS.items()}
        figures.append(Figure(key=key, title=title, unit=unit, peers=tuple(theirs)))
        figures += [Figure(key=their_key, title=f"… {name}", unit=unit) for their_key, name in theirs.items()]
    return tuple(figures)


BENCHMARK = Benchmark(
    name="dashboard",
    title="Dashboard",
    rounds=3,
    quick_rounds=1,
    contenders=(
        contender("1,000 workers", "load", usual_s=120.0, timeout_s=600.0),
        contender("strata", "strata", usual_s=35.0),
        peer("tensorboard", usual_s=45.0),
        peer("optuna", usual_s=45.0),
        peer("trackio", usual_s=45.0),
        peer("mlflow", usual_s=75.0),
        peer("ray", usual_s=90.0),
        contender("explorer", "explorer", usual_s=15.0),
        contender("safetensors and numpy", "safetensors", usual_s=10.0),
    ),
    figures=(
        Figure(
            key="vs_best_peer_paint",
            title="first useful paint: Strata / fastest peer",
            quotient=("first_useful_paint_ms", *(f"{prefix}_first_useful_paint_ms" for prefix in PEERS)),
        ),
        Figure(key="http_cpu_fraction", title="1,000 workers at 1 Hz: cores used for 3 open overviews"),
        Figure(key="http_workers_cpu_fraction", title="… for 3 open tables of workers"),
        Figure(key="http_unseen_cpu_fraction", title="… for the dashboard while no page is open"),
        Figure(key="without_http_cpu_fraction", title="… by the coordinator without HTTP"),
        Figure(key="heartbeats_fraction", title="… heartbeats sent / due, the worst of these", better="higher"),
        Figure(key="overview_kb", title="… size of /api/overview", unit="kB"),
        Figure(key="overview_ms", title="… time until it is read, p50", unit="ms"),
        Figure(key="overview_p99_ms", title="… p99", unit="ms"),
        *page_figures(),
        Figure(
            key="tree_20k_ms",
            title="explorer: open a file of 20,000 tensors, descend to one",
            unit="ms",
            peers=("safetensors_tree_20k_ms",),
        ),
        Figure(key="safetensors_tree_20k_ms", title="safetensors: load the file, list names and shapes", unit="ms"),
        Figure(
            key="histogram_64mib_ms",
            title="explorer: open a file, histogram of a tensor of 64 MiB",
            unit="ms",
            peers=("safetensors_histogram_64mib_ms",),
        ),
        Figure(key="safetensors_histogram_64mib_ms", title="safetensors and numpy: load it, np.histogram", unit="ms"),
    ),
    notes=(
        "1,000 workers: a session each, 2 metrics per heartbeat. They share a core with Chromium.",
        "… heartbeats and HTTP share an event loop: the cost of pages is CPU with them open minus CPU without them.",
        "… while no page is open: the CPU of the coordinator with its dashboard minus that of one without HTTP.",
        "… overview: one connection, four requests per second, with 3 pages open.",
        "Pages: 16 runs with 4 metrics of 360 values; the page that lists the runs, warm server, empty cache.",
        "… useful paint: the end of the first frame with a run's or metric's name in the DOM, visible in 1,280 × 800.",
        "… Chromium 5 times per round, the median counts; it reaches this machine only; no core is reserved.",
        "… optuna-dashboard: a study per run and a trial per metric. Ray's dashboard: a job per run, no metrics.",
        "… scripts are compressed with gzip -9 by the benchmark, whether or not a server compresses them.",
        "Explorer: over HTTP; each repetition opens another name of the same file, which is in the page cache.",
    ),
)
