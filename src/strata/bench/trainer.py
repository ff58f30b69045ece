"""`strata bench trainer`: the cost of the Trainer's loop, of its workers and of fitting features, against peers."""

from __future__ import annotations

from strata.bench.frame import Benchmark, Contender, Figure, Setting


def contender(name: str, module: str, *, usual_s: float = 20.0, timeout_s: float = 300.0) -> Contender:
    return Contender(
        name=name, module=f"strata.bench.contenders.trainer_{module}", usual_s=usual_s, timeout_s=timeout_s
    )


BENCHMARK = Benchmark(
    name="trainer",
    title="Trainer",
    contenders=(
        contender("loop", "loop", usual_s=40.0),
        contender("strata, 2 workers", "workers"),
        contender("torchrun, 2 workers", "torchrun"),
        contender("Lightning, 2 workers", "lightning", usual_s=30.0),
        contender("strata on Ray", "ray", usual_s=40.0),
        contender("Ray Train", "ray_train", usual_s=40.0),
        contender("strata features", "features"),
        Contender(
            name="pandas and sklearn",
            module="strata.bench.contenders.trainer_features_sklearn",
            venv="peers",
            usual_s=60.0,
            timeout_s=600.0,
        ),
    ),
    figures=(
        Figure(key="loop_overhead_us", title="Trainer: time per step on top of the plain loop", unit="µs"),
        Figure(key="loop_dataset_overhead_us", title="… with a Dataset of your own, seeded per batch", unit="µs"),
        Figure(key="lightning_overhead_us", title="… Lightning", unit="µs"),
        Figure(key="accelerate_overhead_us", title="… Accelerate", unit="µs"),
        Figure(key="loop_step_us", title="… a step of the plain loop", unit="µs"),
        Figure(key="loop_noise_us", title="… another plain loop: the noise", unit="µs"),
        Figure(
            key="samples_over_ddp_script",
            title="2 workers, samples/s: Trainer / DDP script under torchrun",
            better="higher",
            quotient=("samples_per_s", "torchrun_samples_per_s"),
        ),
        Figure(
            key="start_over_best_peer",
            title="2 workers, start to first step: Trainer / faster peer",
            quotient=("start_s", "torchrun_start_s", "lightning_start_s"),
        ),
        Figure(
            key="vs_ray_train_start",
            title="on Ray, fit to first step: Ray Train / Trainer",
            better="higher",
            quotient=("ray_train_start_s", "ray_start_s"),
        ),
        Figure(
            key="vs_ray_train_samples",
            title="on Ray, samples/s: Trainer / Ray Train",
            better="higher",
            quotient=("ray_samples_per_s", "ray_train_samples_per_s"),
        ),
        Figure(
            key="features_over_sklearn",
            title="fitting features: pandas and sklearn / Strata",
            better="higher",
            quotient=("sklearn_features_s", "features_s"),
        ),
        Figure(key="start_s", title="Trainer, 2 workers: fit to first step", unit="s"),
        Figure(key="command_start_s", title="… from the command, with imports", unit="s"),
        Figure(key="torchrun_start_s", title="torchrun and script: command to first step", unit="s"),
        Figure(key="lightning_start_s", title="Lightning, DDP: fit to first step", unit="s"),
        Figure(key="samples_per_s", title="Trainer, 2 workers", unit="samples/s", better="higher"),
        Figure(key="torchrun_samples_per_s", title="torchrun and script", unit="samples/s", better="higher"),
        Figure(key="lightning_samples_per_s", title="Lightning, DDP", unit="samples/s", better="higher"),
        Figure(key="ray_start_s", title="Trainer on a Ray cluster: fit to first step", unit="s"),
        Figure(key="ray_train_start_s", title="Ray Train on a Ray cluster: fit to first step", unit="s"),
        Figure(key="ray_samples_per_s", title="Trainer on Ray", unit="samples/s", better="higher"),
        Figure(key="ray_train_samples_per_s", title="Ray Train", unit="samples/s", better="higher"),
        Figure(key="features_s", title="fitting 8 sparse and 4 dense features", unit="s"),
        Figure(key="sklearn_features_s", title="… pandas and sklearn", unit="s"),
    ),
    rounds=3,
    quick_rounds=1,
    settings=(Setting(name="rows", title="rows for fitting features (default 10000000)", at_least=1_000),),
    notes=(
        "Loop: a network of 2 × 64 units, batches of 256 rows in memory, Adam; all loops alternate in one process.",
        "… Lightning without logger, checkpoints and progress bar; the Trainer with its defaults, on tensors.",
        "… The plain loop, Lightning and Accelerate use a DataLoader over a Dataset that indexes batches at once.",
        "2 workers: gloo on one machine, one thread each, a network of 3 × 256 units, batches of 1,024 rows.",
        "The Trainer and Lightning are timed from fit, torchrun from its command: it has no earlier moment.",
        "Ray: a cluster of this machine that is already running.",
        "Features: Parquet with 8 columns of strings or integers and 4 of floats; sklearn's OrdinalEncoder and",
        "… StandardScaler on a pandas DataFrame. Reading the file is part of both.",
    ),
)
